"""Looks a configuration over before it costs anything: inputs, weights, memory, storage, server, each with its hint."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import features

from configs.checks import pools_of
from configs.schema import RunConfig
from configs.sections import ImageRolloutSection
from flows.preflight.inputs import input_problems
from flows.server.reachable import require_pools, require_server, server_url, workers_online
from grpo_core.errors import InputError, InputErrors
from grpo_core.policies.estimate import GIB, MemoryEstimate, ModelEstimate, Workload
from grpo_core.policies.family import policy_family
from grpo_core.policies.trained import TrainingChoice
from tasks.storage.artifacts.open_store import open_store
from tasks.storage.filesystem.files import is_local


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what.
        healthy: whether a run would get past it.
        said: what was found.
        hint: what to do when it is not healthy.
    """

    subject: str
    healthy: bool
    said: str
    hint: str = ""


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
        choice = config.policy.training_choice(reference=config.reference_placement, seed=0)
        policy_family(config.policy.kind).refuse_choice(config.policy.model, choice)
        estimate = model_estimate(config, choice)
        memory, checkpoint = estimate.memory, estimate.checkpoint
        findings += [_weights(config, estimate.counted), _memory(config, memory)]
    except InputError as error:
        if not any(finding.said.startswith(error.place) for finding in findings):
            findings.append(Finding("model", False, f"{error.place}: {error.value!r}", error.hint))
    findings += [_storage(config, checkpoint), _fonts(), *_server(config)]
    return Diagnosis(tuple(findings), memory)


def _inputs(config: RunConfig) -> Iterator[Finding]:
    problems = list(input_problems(config))
    for problem in problems:
        yield Finding("inputs", False, f"{problem.place}: got {problem.value!r}", problem.hint)
    if not problems:
        labels = ", ".join(reward.label for reward in config.rewards)
        yield Finding("inputs", True, f"prompts, targets and image size are usable; rewards ready: {labels}")


def model_estimate(config: RunConfig, choice: TrainingChoice) -> ModelEstimate:
    """What the configuration needs of one GPU and of the disk."""
    family, rollout = policy_family(config.policy.kind), config.rollout
    workload = Workload(
        dtype=config.policy.dtype,
        group_size=rollout.group_size,
        prompts_per_batch=rollout.prompts_per_batch,
        micro_batch_size=config.update.micro_batch_size,
        eight_bit_optimizer=config.update.optimizer.endswith("8bit"),
    )
    return family.estimate(config.policy.model, rollout, choice, workload)


def _weights(config: RunConfig, counted: str) -> Finding:
    model = config.policy.model
    folder = Path(model).expanduser()
    if folder.is_dir() and not any(folder.rglob("*.safetensors")):
        return Finding("weights", False, f"{model}: {counted}", "The folder holds no weights; save the model there.")
    if folder.is_dir() or _cached(model):
        return Finding("weights", True, f"{model}: {counted}")
    hint = f"They are not on this machine: run `hf download {model}`, or set policy.model to a folder."
    return Finding("weights", False, f"{model}: {counted}", hint)


def _cached(model: str) -> bool:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return False
    return any(folder.rglob("*.safetensors"))


def _memory(config: RunConfig, memory: MemoryEstimate) -> Finding:
    needed = memory.needed / GIB
    if config.placement.device == "cpu" or not torch.cuda.is_available():
        wanted = config.placement.device == "cuda"
        said = f"no GPU here; the run would need about {needed:.3g} GiB"
        hint = "Set placement.device: auto, or run on a machine with a GPU." if wanted else ""
        return Finding("memory", not wanted, said, hint)
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    said = f"about {needed:.3g} GiB of {free / GIB:.3g} free ({total / GIB:.3g} in all) on {name}"
    hint = "Lower rollout.prompts_per_batch, decode_batch_size or micro_batch_size, or set gradient_checkpointing."
    return Finding("memory", needed * GIB <= free, said, "" if needed * GIB <= free else hint)


def _storage(config: RunConfig, checkpoint: int) -> Finding:
    try:
        store = open_store(config.storage, config.run.name)
    except InputError as error:
        return Finding("storage", False, f"{error.place}: got {error.value!r}", error.hint)
    if not is_local(store.filesystem):
        return Finding("storage", True, f"{config.storage.root} (not tried: looking changes nothing)")
    nearest = next(place for place in (Path(store.path()), *Path(store.path()).parents) if place.exists())
    if not os.access(nearest, os.W_OK):
        return Finding("storage", False, f"{nearest} cannot be written", "Set storage.root to a folder that can.")
    free = shutil.disk_usage(nearest).free / GIB
    samples = config.rows_per_iteration * config.run.iterations
    rollout = config.rollout
    said = ""
    drawn = 0.0
    if isinstance(rollout, ImageRolloutSection):
        # Uncompressed, so that a PNG of noise is covered too.
        drawn = samples * rollout.height * rollout.width * 3 / GIB
        said = f"{samples} images take at most {drawn:.2g} GiB, "
    policies = config.run.iterations * checkpoint / GIB
    said = (
        f"{config.storage.root}: {free:.3g} GiB free; {said}"
        f"{config.run.iterations} policies with their optimizer state {policies:.2g} GiB"
    )
    enough = free > drawn + policies
    return Finding("storage", enough, said, "" if enough else "Free some space, or set storage.root to a larger disk.")


def _fonts() -> Finding:
    ready = bool(features.check("freetype2"))
    hint = "" if ready else "Install a Pillow that was built with FreeType: the contact sheet's labels need it."
    return Finding("fonts", ready, "Pillow draws labels with FreeType" if ready else "Pillow lacks FreeType", hint)


def _server(config: RunConfig) -> Iterator[Finding]:
    url, pools = server_url(), pools_of(config)
    try:
        require_pools(pools)
        require_server()
    except InputErrors as errors:
        yield from (
            Finding("server", False, f"{error.place}: got {error.value!r}", error.hint) for error in errors.errors
        )
        return
    except InputError as error:
        yield Finding("server", False, f"{error.place}: got {error.value!r}", error.hint)
        return
    if url is None:
        yield Finding("server", True, "none configured: a run starts a temporary one of its own")
        return
    yield Finding("server", True, f"{url} answers")
    for pool in sorted({pool for _, pool in pools}):
        online = workers_online(pool)
        hint = "" if online else f"Start one with `grpo worker {pool}`; until then its stages wait."
        yield Finding("workers", online > 0, f"{online} of pool {pool} heard of lately", hint)
