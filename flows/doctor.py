"""Looks a configuration over before it costs anything: inputs, weights, memory, storage, server, each with its mend."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from PIL import features

from configs.schema import RunConfig
from flows.inputs import input_problems
from grpo_core.errors import InputError
from grpo_core.policies.glm_image.architecture import find_configs
from grpo_core.policies.glm_image.memory import GIB, MemoryEstimate, checkpoint_bytes, estimate_memory
from grpo_core.policies.glm_image.policy import LANGUAGE_MODEL_LINEARS
from grpo_core.policies.glm_image.sizes import ComponentSizes, component_sizes
from tasks.storage.files import is_local
from tasks.storage.store import ArtifactStore


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what.
        healthy: whether a run would get past it.
        said: what was found.
        mend: what to do when it is not healthy.
    """

    subject: str
    healthy: bool
    said: str
    mend: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        findings: in the order they were looked at.
        memory: the estimate, where the model's configuration could be read.
    """

    findings: tuple[Finding, ...]
    memory: MemoryEstimate | None

    @property
    def healthy(self) -> bool:
        """Whether nothing stands in the way."""
        return all(finding.healthy for finding in self.findings)


def examine(config: RunConfig) -> Diagnosis:
    """Look everything over; nothing is loaded, drawn or changed."""
    findings = [*_inputs(config)]
    memory: MemoryEstimate | None = None
    checkpoint = 0
    try:
        sizes = _sizes(config)
        checkpoint = checkpoint_bytes(sizes, config.policy.dtype)
        memory = memory_estimate(config, sizes)
        findings += [_weights(config, sizes), _memory(config, memory)]
    except InputError as error:
        if not any(finding.said.startswith(error.place) for finding in findings):
            findings.append(Finding("model", False, f"{error.place}: {error.value!r}", error.mend))
    findings += [_storage(config, checkpoint), _fonts(), _server()]
    return Diagnosis(tuple(findings), memory)


def _inputs(config: RunConfig) -> Iterator[Finding]:
    problems = list(input_problems(config))
    for problem in problems:
        yield Finding("inputs", False, f"{problem.place}: got {problem.value!r}", problem.mend)
    if not problems:
        labels = ", ".join(reward.label for reward in config.rewards)
        yield Finding("inputs", True, f"prompts, targets and picture size are usable; rewards ready: {labels}")


def _sizes(config: RunConfig) -> ComponentSizes:
    lora = config.policy.lora
    return component_sizes(
        find_configs(config.policy.model),
        lora_rank=lora.rank if lora else None,
        lora_targets=(lora.targets or LANGUAGE_MODEL_LINEARS) if lora else None,
    )


def memory_estimate(config: RunConfig, sizes: ComponentSizes) -> MemoryEstimate:
    """What the configuration needs on one GPU."""
    rollout, update = config.rollout, config.update
    return estimate_memory(
        sizes,
        dtype=config.policy.dtype,
        height=rollout.height,
        width=rollout.width,
        group_size=rollout.group_size,
        prompts_per_batch=rollout.prompts_per_batch,
        decode_batch_size=rollout.decode_batch_size,
        micro_batch_size=update.micro_batch_size,
        kl_coef=update.kl_coef,
        gradient_checkpointing=config.policy.gradient_checkpointing,
    )


def _weights(config: RunConfig, sizes: ComponentSizes) -> Finding:
    model = config.policy.model
    counted = (
        f"token model {sizes.autoregressive / 1e9:.3g} B parameters, decoder {sizes.decoder / 1e9:.3g} B"
        + (f", adapters {sizes.adapter / 1e6:.3g} M" if sizes.adapter else "")
        + f"; pictures in units of {sizes.unit} pixels"
    )
    folder = Path(model).expanduser()
    if folder.is_dir() and not any(folder.glob("vision_language_encoder/*.safetensors")):
        return Finding("weights", False, f"{model}: {counted}", "The folder holds no weights; save the pipeline there.")
    if folder.is_dir() or _cached(model):
        return Finding("weights", True, f"{model}: {counted}")
    mend = f"They are not on this machine: run `hf download {model}`, or set policy.model to a folder."
    return Finding("weights", False, f"{model}: {counted}", mend)


def _cached(model: str) -> bool:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return False
    return any(folder.glob("vision_language_encoder/*.safetensors"))


def _memory(config: RunConfig, memory: MemoryEstimate) -> Finding:
    needed = memory.needed / GIB
    if config.placement.device == "cpu" or not torch.cuda.is_available():
        wanted = config.placement.device == "cuda"
        said = f"no GPU here; the run would need about {needed:.3g} GiB"
        mend = "Set placement.device: auto, or run on a machine with a GPU." if wanted else ""
        return Finding("memory", not wanted, said, mend)
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    said = f"about {needed:.3g} GiB of {free / GIB:.3g} free ({total / GIB:.3g} in all) on {name}"
    mend = "Lower rollout.prompts_per_batch, decode_batch_size or micro_batch_size, or set gradient_checkpointing."
    return Finding("memory", needed * GIB <= free, said, "" if needed * GIB <= free else mend)


def _storage(config: RunConfig, checkpoint: int) -> Finding:
    try:
        store = ArtifactStore(config.storage.root, config.run.name)
    except InputError as error:
        return Finding("storage", False, f"{error.place}: got {error.value!r}", error.mend)
    if not is_local(store.filesystem):
        return Finding("storage", True, f"{config.storage.root} (not tried: looking changes nothing)")
    nearest = next(place for place in (Path(store.path()), *Path(store.path()).parents) if place.exists())
    if not os.access(nearest, os.W_OK):
        return Finding("storage", False, f"{nearest} cannot be written", "Set storage.root to a folder that can.")
    free = shutil.disk_usage(nearest).free / GIB
    pictures = config.rows_per_iteration * config.run.iterations
    # Uncompressed, so that a PNG of noise is covered too.
    drawn = pictures * config.rollout.height * config.rollout.width * 3 / GIB
    policies = config.run.iterations * checkpoint / GIB
    said = (
        f"{config.storage.root}: {free:.3g} GiB free; {pictures} pictures take at most {drawn:.2g} GiB, "
        f"{config.run.iterations} policies with their optimizer state {policies:.2g} GiB"
    )
    enough = free > drawn + policies
    return Finding("storage", enough, said, "" if enough else "Free some space, or set storage.root to a larger disk.")


def _fonts() -> Finding:
    ready = bool(features.check("freetype2"))
    mend = "" if ready else "Install a Pillow that was built with FreeType: the contact sheet's labels need it."
    return Finding("fonts", ready, "Pillow draws labels with FreeType" if ready else "Pillow lacks FreeType", mend)


def _server() -> Finding:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return Finding("server", True, "none configured: a run starts a temporary one of its own")
    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=5).raise_for_status()
    except httpx.HTTPError as error:
        mend = "Start it (`prefect server start`), or unset PREFECT_API_URL to use a temporary one."
        return Finding("server", False, f"{url}: {error}", mend)
    return Finding("server", True, f"{url} answers")
