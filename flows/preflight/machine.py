"""What this machine has for a run: memory of its GPUs, disk, fonts; and what the run would take of it, and do."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.rollouts import ImageRolloutSection
from configs.schema import RunConfig
from flows.preflight.model import refuse_offload_without_room, reward_device, reward_model_bytes
from flows.preflight.prompts import PromptFiles
from grpo_core.errors import InputError
from grpo_core.policies.estimate import ERROR_MARGIN, GIB, PHASES, MemoryEstimate
from grpo_core.rollouts.streams import ImageSize
from tasks.reports.report import Table
from tasks.reports.text import counted
from tasks.storage.artifacts.store import open_store
from tasks.storage.files import is_local, nearest_existing

SIZES_SHOWN = 8
"""Number of image sizes that are named."""

SERVER_BYTES = 2**26
"""Room for the database of Prefect's temporary server, and for logs."""

PARTS_SHOWN = 3
"""Number of parts of the memory that are named."""


@dataclass(frozen=True)
class Finding:
    """What the checks of a subject found; `healthy` if a run would get past them, or else with a hint; and notes."""

    subject: str
    healthy: bool
    message: str
    hint: str = ""
    notes: tuple[str, ...] = ()


def on_this_machine(config: RunConfig, memory: MemoryEstimate, moved: MemoryEstimate) -> MemoryEstimate:
    """Return the memory that a run takes on this machine; `memory` and `moved` are without and with offloading.

    `memory` is with offloading if all runs do.
    """
    if not torch.cuda.is_available() or "cpu" in config.placement.devices:
        return memory
    total = torch.cuda.mem_get_info()[1]
    chosen = moved if config.policy.offload == "auto" and memory.one_by_one().needed > total else memory
    return chosen.one_by_one() if chosen.needed > total else chosen


def rewards_beside(config: RunConfig, memory: MemoryEstimate) -> list[str]:
    """Say where reward models of device auto run, and what they take of a GPU that has this policy."""
    if not (taken := reward_model_bytes(config, ["auto"])):
        return []
    place = "beside it" if reward_device(config, memory.needed) == "auto" else "on the CPU, for want of room"
    return [f"reward models of device auto: {taken / GIB:.2g} GiB more, {place}"]


def compare_memory(config: RunConfig, memory: MemoryEstimate, moved: MemoryEstimate) -> Finding:
    """Compare the estimate of a run's memory, and that with offloaded components, with this machine."""
    needed = memory.needed / GIB
    devices = config.placement.devices
    try:
        refuse_offload_without_room(config, moved)
    except InputError as error:
        return Finding("memory", False, f"{error.place}: got {error.value!r}", error.hint)
    if "cpu" in devices or not torch.cuda.is_available():
        wanted = not {"auto", "cpu"} & {*devices}
        ways = {"a backward pass for each step": memory.one_by_one(), "policy.offload components": moved}
        # A tiny model gains less than the digits show.
        fewer = {way: each.needed for way, each in ways.items() if each.needed < 0.99 * memory.needed}
        message = f"there is no GPU; the run would need about {needed:.3g} GiB"
        message += "".join(f", {least / GIB:.3g} with {way}" for way, least in fewer.items())
        hint = "Set placement.devices: auto, or run on a machine with a GPU." if wanted else ""
        return Finding("memory", not wanted, message, hint)
    # Every process needs the same; the device with the least decides.
    found = [each for each in devices if isinstance(each, int)] or [torch.cuda.current_device()]
    free, total, device = min((*torch.cuda.mem_get_info(each), each) for each in found)
    name = torch.cuda.get_device_name(device)
    message = f"about {needed:.3g} GiB of {free / GIB:.3g} free ({total / GIB:.3g} in total) on {name}"
    hint = "Lower rollout.prompts_per_batch, decode_batch_size or micro_batch_size, or set gradient_checkpointing"
    hint += ", policy.offload or policy.quantization: docs/first_gpu.md."
    return Finding("memory", needed * GIB <= free, message, "" if needed * GIB <= free else hint)


def memory_table(memory: MemoryEstimate) -> Table:
    """Return what each part takes in each phase, and their sums."""
    rows = [
        {"part": part.name, "counted": "exactly" if part.exact else "about"}
        | {PHASES[each]: f"{part.bytes / GIB:.2f}" if each in part.phases else "" for each in memory.phases}
        for part in memory.parts
    ]
    sums = {PHASES[each]: f"{memory.in_phase(each) / GIB:.2f}" for each in memory.phases}
    margin = f"the largest phase and {ERROR_MARGIN:.0%} for workspaces and fragmentation"
    note = f"a GPU should have {memory.needed / GIB:.3g} GiB: {margin}"
    return Table("GPU memory, estimated, in GiB", [*rows, {"part": "all", "counted": "about"} | sums], note=note)


def largest_phase(memory: MemoryEstimate) -> str:
    """Name the phase that decides the memory, and the parts that take the most of it."""
    phase = max(memory.phases, key=memory.in_phase)
    parts = sorted((part for part in memory.parts if phase in part.phases), key=lambda part: -part.bytes)
    largest = ", ".join(f"{part.name} {part.bytes / GIB:.2g} GiB" for part in parts[:PARTS_SHOWN])
    return f"the most in {PHASES[phase]}: {largest}; --memory shows all parts and phases"


def describe_sizes(prompts: Counter[ImageSize], tokens: Mapping[ImageSize, int]) -> Finding:
    """Name the sizes, those with the most tokens first: they decide the memory."""
    largest_first = sorted(tokens, key=lambda size: (-tokens[size], size))
    named = [
        f"{size} of {tokens[size]} tokens ({counted(prompts[size], 'prompt')})" for size in largest_first[:SIZES_SHOWN]
    ]
    more = len(tokens) - len(named)
    return Finding("sizes", True, ", ".join(named) + (f" and {more} with fewer tokens" if more else ""))


def _temporary(config: RunConfig, checkpoint: int, states: int, *, remote: bool) -> tuple[str, str]:
    """Describe the room for temporary files, with those of a bucket, and what to do if it is too small."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    needed = SERVER_BYTES + config.samples_per_iteration * states + (2 * checkpoint if remote else 0)
    message = f"{folder} for temporary files: {free / GIB:.3g} GiB free, {needed / GIB:.2g} GiB needed"
    hint = f"Free some space in {folder}, or let the variable TMPDIR name a folder on a larger disk."
    return message, hint if free < needed else ""


def compare_disk(config: RunConfig, checkpoint: int, states: int, prompts: Mapping[ImageSize, int]) -> Finding:
    """Compare the free space with what the run stores; a checkpoint and an image's denoising states are in bytes."""
    store = open_store(config.storage, config.run.name)
    scratch, lacks = _temporary(config, checkpoint, states, remote=not is_local(store.filesystem))
    if lacks or not is_local(store.filesystem):
        place = "" if lacks else f"{config.storage.root} (not tried: a check writes nothing); "
        return Finding("disk", not lacks, f"{place}{scratch}", lacks)
    free = shutil.disk_usage(nearest_existing(Path(store.path()))).free / GIB
    samples = config.samples_per_iteration * config.run.iterations
    rollout = config.rollout
    message, images = "", 0.0
    if isinstance(rollout, ImageRolloutSection):
        # Uncompressed, so that a PNG of noise is covered too.
        images = samples * max(size.pixels for size in (prompts or (rollout.size,))) * 3 / GIB
        message = f"{samples} images take at most {images:.2g} GiB, "
        if states:
            images += samples * states / GIB
            message += f"their denoising states {samples * states / GIB:.2g} GiB, "
    keep = config.run.keep_policies
    last = config.run.iterations
    versions = keep.count(last, config.run.staleness, checkpoint) if keep else last
    policies = versions * checkpoint / GIB
    deleted = ", the others are deleted (run.keep_policies)" if versions < last else ""
    message = (
        f"{config.storage.root}: {free:.3g} GiB free; {message}{counted(versions, 'policy version')} with optimizer "
        f"state {policies:.2g} GiB, {checkpoint / GIB:.2g} each{deleted}; {scratch}"
    )
    enough = free > images + policies
    fewer = "" if versions < last else ", or keep fewer policies (run.keep_policies)"
    hint = f"Free some space, set storage.root to a larger disk{fewer}."
    return Finding("disk", enough, message, "" if enough else hint)


def find_fonts(config: RunConfig, prompts: PromptFiles) -> Finding:
    """Say which scripts no font has, of labels and of prompts below images; a run shows their code points instead."""
    texts = [section.label for section in (*config.rewards, *config.guardrails.rewards)]
    if isinstance(config.rollout, ImageRolloutSection):
        sets = (*prompts.usable("data"), *prompts.usable("evaluate"))
        texts += [each.text for part in sets for each in part.prompts]
    others = {letter for text in texts for letter in text if not letter.isascii()}
    if not others:
        return Finding("fonts", True, "DejaVu Sans, which matplotlib brings, has every letter")
    # Matplotlib takes a while to import.
    from tasks.reports.fonts import FONTS_HINT, fonts_for

    fonts = fonts_for(others)
    if not fonts.missing_scripts:
        used = ", ".join(Path(path).name for path in fonts.paths)
        return Finding("fonts", True, f"{used} have every letter")
    message = f"none has {counted(len(fonts.missing), 'letter')} ({fonts.missing_scripts}): images show the code points"
    return Finding("fonts", True, message, FONTS_HINT)


def describe_work(config: RunConfig) -> str:
    """Say what a training samples, and that a CPU is slow; evaluations are not counted."""
    rollout, each, iterations = config.rollout, config.samples_per_iteration, config.run.iterations
    if isinstance(rollout, ImageRolloutSection):
        sampled = (
            f"{each * iterations:,} images of {rollout.size}, each with {counted(rollout.num_inference_steps, 'step')}"
        )
        if (chosen := rollout.previews) is not None:
            previews = chosen.per_prompt * rollout.prompts_per_iteration * iterations
            sampled += f", chosen by {previews:,} previews with {counted(chosen.steps, 'step')}"
    else:
        length = getattr(rollout, "max_completion_length", 0)
        sampled = f"{each * iterations:,} completions of at most {counted(length, 'token')}"
    work = f"{counted(iterations, 'iteration')} sample {sampled}, and train on them"
    if torch.cuda.is_available() and "cpu" not in config.placement.devices:
        return work
    dtype = config.policy.autocast or config.policy.dtype
    slow = "" if _computes_in(dtype) else f"; this CPU has no instructions for {dtype}, so it takes many times as long"
    left = "a run says after each iteration how much is left"
    return f"{work}; without a GPU all but the tiny models are slow{slow}, and {left}"


def _computes_in(dtype: str) -> bool:
    name = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    return name is None or any(has for each, has in torch.cpu.get_capabilities().items() if name in each)
