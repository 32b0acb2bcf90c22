"""Check a configuration before it costs anything: inputs, weights, memory, disk, server; each problem has a hint."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from configs.contradictions import pools_of
from configs.schema import RunConfig
from configs.sections import ImageRolloutSection
from flows.preflight.engine import engine_notes
from flows.preflight.files import prepare_hub
from flows.preflight.inputs import CHECKS
from flows.preflight.model import (
    estimate_model,
    refuse_offload_without_room,
    refuse_prompt_texts,
    source_of,
    try_loaded,
)
from flows.preflight.prompts import PromptFiles, read_prompt_files
from flows.preflight.rewards import code_notes, try_functions
from flows.preflight.weights import find_weights
from flows.preflight.work import describe_work
from flows.server.reachable import require_pools, require_server, require_ui, server_url, workers_online
from grpo_core.errors import InputError
from grpo_core.policies.estimate import ERROR_MARGIN, GIB, PHASES, MemoryEstimate
from grpo_core.policies.protocol import policy_family
from grpo_core.streams import ImageSize
from tasks.models.initial import training_choices
from tasks.reports.report import Report, Table
from tasks.reports.text import counted
from tasks.rollouts.engines import uses_resident_policy
from tasks.runs.stored_policies import adapter_version
from tasks.storage.artifacts.store import open_store
from tasks.storage.files import is_local, nearest_existing

SIZES_SHOWN = 8
"""Number of image sizes that are named."""

SERVER_BYTES = 2**26
"""Room for the database of Prefect's temporary server, and for logs."""

TRIED = "models like this one are tried by this project's tests"
UNTRIED = "models like this one are not tried by this project's tests: `grpo doctor --load` loads it and tries it here"

PARTS_SHOWN = 3
"""Number of parts of the memory that are named."""


@dataclass(frozen=True)
class Finding:
    """What the checks of a subject found; `healthy` if a run would get past them, or else with a hint.

    `notes` say what a person should know about it in either case.
    """

    subject: str
    healthy: bool
    message: str
    hint: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """The results of all checks; without a memory estimate when the model's configuration cannot be read.

    A subject has one verdict: its problems, or what is right with it.
    """

    findings: tuple[Finding, ...]
    memory: MemoryEstimate | None

    @property
    def healthy(self) -> bool:
        """Whether a run could start."""
        return all(finding.healthy for finding in self.findings)

    def with_problems(self, subject: str, errors: Iterable[InputError]) -> "Diagnosis":
        """Add what else is wrong."""
        return replace(self, findings=(*self.findings, *_problems(subject, errors)))

    def report(self, *, tables: bool = False) -> Report:
        """Return each finding with its hint, and the verdict.

        Args:
            tables: whether the memory estimate is shown by part and phase.
        """
        notes = []
        for each in self.findings:
            notes += [f"{'ok' if each.healthy else 'problem':<7} {each.subject}: {each.message}"]
            notes += [f"        {line}" for line in (each.hint, *each.notes) if line]
        problems = sum(not each.healthy for each in self.findings)
        notes.append(f"{counted(problems, 'problem')} to fix first" if problems else "ready to train")
        memory = self.memory if tables else None
        estimate = [_memory_table(memory)] if memory else []
        return Report("", tables=estimate, notes=notes)


def examine(
    config: RunConfig, report_progress: Callable[[str], None] = lambda line: None, *, load: bool = False
) -> Diagnosis:
    """Run every check of a training run and estimate what it needs; nothing is changed.

    Args:
        report_progress: called with a line before a step that can take long.
        load: whether the model is loaded and tried, if nothing is wrong with what can be seen before.
    """
    prepare_hub(config)
    weights = find_weights(config)
    prompts = read_prompt_files(config)
    findings: list[Finding] = []
    notes = {"prompts": prompts.notes, "engine": engine_notes(config), "weights": weights.notes}
    for subject, check in CHECKS.items():
        found = _problems(subject, check(config, prompts))
        if not found and subject == "rewards":
            found = _rewards(config, prompts, report_progress)
        findings += found or [Finding(subject, True, _ready(subject, config, prompts))]
    memory: MemoryEstimate | None = None
    checkpoint = states = 0
    sizes: Counter[ImageSize] = Counter()
    # What is wrong with the model, or with the sizes that it is to generate, has been reported.
    if all(finding.healthy for finding in findings if finding.subject == "model"):
        sizes = _prompts_by_size(prompts)
        longest, refused = _prompt_length(config, prompts) if weights.described else (None, [])
        try:
            policy, version = config.policy, adapter_version(config)
            store = open_store(config.storage, config.run.name) if version else None
            with training_choices(policy, store, version, references=config.references) as choices:
                family, source = policy_family(policy.kind), source_of(config)
                notes["model"] = (TRIED if family.is_tried(source) else UNTRIED, *family.check_choices(source, choices))
                estimate = estimate_model(config, choices, tuple(sizes), longest=longest)
                moved = estimate_model(config, choices, tuple(sizes), offload=True, longest=longest).memory
            memory, checkpoint, states = estimate.memory, estimate.checkpoint, estimate.states
            if _offloads(config, memory):
                memory = moved
            model = f"{policy.model}: {estimate.counted}"
            missing = None if weights.problem is None else weights.problem.hint
            findings += [Finding("weights", missing is None, model, missing or ""), _memory(config, memory, moved)]
            notes["memory"] = (_largest_phase(memory),)
            if sizes:
                findings.append(_sizes(sizes, estimate.tokens))
            findings += refused
        except InputError as error:
            # What is not here cannot be read.
            unread = error if weights.described else weights.problem
            findings += _problems("model", unread.errors if unread is not None else ())
            if unread is None:
                findings.append(Finding("weights", True, f"{config.policy.model}, which is checked once it is here"))
    if load and all(finding.healthy for finding in findings):
        report_progress(f"loading {config.policy.model}")
        findings += _trial(config)
    if all(finding.healthy for finding in findings if finding.subject == "storage"):
        findings.append(_disk(config, checkpoint, states, sizes))
    findings += [Finding("work", True, describe_work(config)), _fonts(config, prompts), *_server(config)]
    return Diagnosis(_one_verdict_each(findings, notes), memory)


def _trial(config: RunConfig) -> list[Finding]:
    """Load the model and try it."""
    try:
        return [Finding("trial", True, try_loaded(config))]
    except InputError as error:
        return _problems("trial", error.errors)


def _prompt_length(config: RunConfig, prompts: PromptFiles) -> tuple[int | None, list[Finding]]:
    """Return the ids of the longest prompt, as far as they are known, and what is wrong with prompts."""
    try:
        return refuse_prompt_texts(config, prompts), []
    except InputError as error:
        return None, _problems("model", error.errors)


def _one_verdict_each(findings: Sequence[Finding], notes: Mapping[str, tuple[str, ...]]) -> tuple[Finding, ...]:
    """Leave out what is right with a subject that has a problem, and add the notes of each subject to its last finding.

    Args:
        findings: of all checks; a later one may see what an earlier one of the same subject could not.
    """
    verdicts: list[Finding] = []
    for subject in dict.fromkeys(each.subject for each in findings):
        own = [each for each in findings if each.subject == subject]
        *first, last = [each for each in own if not each.healthy] or own
        verdicts += [*first, replace(last, notes=(*last.notes, *notes.get(subject, ())))]
    return tuple(verdicts)


def _problems(subject: str, errors: Iterable[InputError]) -> list[Finding]:
    return [Finding(subject, False, f"{error.place}: got {error.value!r}", error.hint) for error in errors]


def _ready(subject: str, config: RunConfig, prompts: PromptFiles) -> str:
    """Describe what a check found when nothing is wrong."""
    training, heldout = (prompts.usable(section) for section in ("data", "evaluate"))
    counts = [sum(len(each.prompts) for each in sets) for sets in (training, heldout)]
    targets = sum(target is not None for each in (*training, *heldout) for target in each.targets)
    optimizers = dict.fromkeys(update.optimizer for update in config.updates.values())
    return {
        "prompts": f"{counts[0]} for training and {counts[1]} held out"
        + (f", {'all' if targets == sum(counts) else targets} with a target image" if targets else ""),
        "model": f"{config.policy.model} can sample with these settings",
        "update": ", ".join(update.objective for update in config.updates.values()),
        "engine": getattr(config.rollout, "engine", "policy"),
        "device": f"{_placed(config)}, optimizer {', '.join(optimizers)}",
        "storage": config.storage.root,
        "trackers": f"ready: {', '.join(config.run.trackers)}" if config.run.trackers else "none",
    }[subject]


def _rewards(config: RunConfig, prompts: PromptFiles, report_progress: Callable[[str], None]) -> list[Finding]:
    """Call the functions of the user once; return how training would refuse them, or which rewards are ready."""
    trials = list(try_functions(config, prompts, report_progress))
    if refused := _problems("rewards", [trial.problem for trial in trials if trial.problem is not None]):
        return refused
    waiting = {trial.label for trial in trials if not trial.called}
    ready = [reward.label for reward in config.rewards if reward.label not in waiting]
    message = [f"ready: {', '.join(ready)}"] if ready else []
    message += [f"loads; not called yet: {label}" for label in sorted(waiting)]
    outcomes = tuple(f"{each.label}: {each.outcome}" for each in trials)
    return [Finding("rewards", True, "; ".join(message), notes=(*outcomes, *code_notes(config)))]


def _placed(config: RunConfig) -> str:
    """Name the devices, and into how many parts they divide the rollouts."""
    placement = config.placement
    names = ", ".join(f"cuda:{each}" if isinstance(each, int) else each for each in placement.devices)
    if not placement.in_processes:
        return names
    rollout = config.rollout
    if not uses_resident_policy({"rollout": rollout, "with_reference": config.advantages.kl_coef > 0}):
        return f"{names}, a process each"
    batches = -(-rollout.prompts_per_iteration // rollout.prompts_per_batch)
    parts = min(batches, placement.shards_of(placement.rollouts))
    divided = f", rollouts in {counted(parts, 'shard')} of complete batches (rollout.prompts_per_batch)"
    return f"{names}, a process each{divided if not placement.rollouts.pool else ''}"


def _prompts_by_size(prompts: PromptFiles) -> Counter[ImageSize]:
    """Count the training and held-out prompts of each image size; texts have none."""
    return Counter(size for section in ("data", "evaluate") for each in prompts.usable(section) for size in each.sizes)


def _sizes(prompts: Counter[ImageSize], tokens: Mapping[ImageSize, int]) -> Finding:
    """Name the sizes, those with the most tokens first: they decide the memory."""
    largest_first = sorted(tokens, key=lambda size: (-tokens[size], size))
    named = [
        f"{size} of {tokens[size]} tokens ({counted(prompts[size], 'prompt')})" for size in largest_first[:SIZES_SHOWN]
    ]
    more = len(tokens) - len(named)
    return Finding("sizes", True, ", ".join(named) + (f" and {more} with fewer tokens" if more else ""))


def _offloads(config: RunConfig, memory: MemoryEstimate) -> bool:
    """Whether a run on this machine offloads components; memory is that without, unless all runs do."""
    if config.policy.offload != "auto" or not torch.cuda.is_available() or "cpu" in config.placement.devices:
        return config.policy.offload == "components"
    return memory.needed > torch.cuda.mem_get_info()[1]


def _memory(config: RunConfig, memory: MemoryEstimate, moved: MemoryEstimate) -> Finding:
    """Compare the estimate with this machine.

    Args:
        memory: of the run.
        moved: with offloaded components, whether or not it does that.
    """
    needed = memory.needed / GIB
    devices = config.placement.devices
    try:
        refuse_offload_without_room(config, moved)
    except InputError as error:
        return Finding("memory", False, f"{error.place}: got {error.value!r}", error.hint)
    if "cpu" in devices or not torch.cuda.is_available():
        wanted = not {"auto", "cpu"} & {*devices}
        # A tiny model gains less than the digits show.
        fewer = moved.needed < 0.99 * memory.needed
        message = f"there is no GPU; the run would need about {needed:.3g} GiB" + (
            f", and {moved.needed / GIB:.3g} with policy.offload components" if fewer else ""
        )
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


def _memory_table(memory: MemoryEstimate) -> Table:
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


def _largest_phase(memory: MemoryEstimate) -> str:
    """Name the phase that decides the memory, and the parts that take the most of it."""
    phase = max(memory.phases, key=memory.in_phase)
    parts = sorted((part for part in memory.parts if phase in part.phases), key=lambda part: -part.bytes)
    largest = ", ".join(f"{part.name} {part.bytes / GIB:.2g} GiB" for part in parts[:PARTS_SHOWN])
    return f"the most in {PHASES[phase]}: {largest}; --memory shows all parts and phases"


def _temporary(config: RunConfig, checkpoint: int, states: int, *, remote: bool) -> tuple[str, str]:
    """Describe the room for temporary files, and what to do if it is too small for an iteration's.

    Args:
        checkpoint, states: as for `_disk`.
        remote: whether the root is a bucket, whose files are copied there.
    """
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    needed = SERVER_BYTES + config.samples_per_iteration * states + (2 * checkpoint if remote else 0)
    message = f"{folder} for temporary files: {free / GIB:.3g} GiB free, {needed / GIB:.2g} GiB needed"
    hint = f"Free some space in {folder}, or let the variable TMPDIR name a folder on a larger disk."
    return message, hint if free < needed else ""


def _disk(config: RunConfig, checkpoint: int, states: int, prompts: Mapping[ImageSize, int]) -> Finding:
    """Compare the free space with what the run stores.

    Args:
        checkpoint: bytes of a policy version.
        states: bytes of an image's denoising states.
    """
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
    versions = keep.count(config.run.iterations, config.run.staleness) if keep else config.run.iterations
    policies = versions * checkpoint / GIB
    message = (
        f"{config.storage.root}: {free:.3g} GiB free; {message}"
        f"{counted(versions, 'policy version')} with optimizer state {policies:.2g} GiB; {scratch}"
    )
    enough = free > images + policies
    fewer = "" if keep else ", or set run.keep_policies"
    hint = f"Free some space, set storage.root to a larger disk{fewer}."
    return Finding("disk", enough, message, "" if enough else hint)


def _fonts(config: RunConfig, prompts: PromptFiles) -> Finding:
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


def _server(config: RunConfig) -> Iterator[Finding]:
    url, pools = server_url(), pools_of(config)
    try:
        require_pools(pools)
        if config.guardrails.on_fall == "pause":
            require_ui("guardrails.on_fall", "pause")
        require_server()
    except InputError as error:
        yield from _problems("server", error.errors)
        return
    if url is None:
        yield Finding("server", True, "none is configured: each run starts a temporary one")
        return
    yield Finding("server", True, f"{url} answers")
    for pool in sorted({pool for _, pool in pools}):
        online = workers_online(pool)
        hint = "" if online else f"Start one with `grpo worker {pool}`; until then its stages wait."
        yield Finding("workers", online > 0, f"pool {pool} has {online} online", hint)
