"""Check a configuration before it costs anything: inputs, weights, memory, disk, server; each problem has a hint."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.contradictions import pools_of
from configs.schema import RunConfig
from flows.preflight.engine import engine_notes
from flows.preflight.files import prepare_hub
from flows.preflight.inputs import CHECKS
from flows.preflight.loaded import LoadedTrial, try_loaded
from flows.preflight.machine import (
    Finding,
    compare_disk,
    compare_memory,
    describe_sizes,
    describe_work,
    find_fonts,
    largest_phase,
    memory_table,
    on_this_machine,
    rewards_beside,
)
from flows.preflight.model import estimate_model, refuse_prompt_texts, source_of
from flows.preflight.prompts import PromptFiles, read_prompt_files
from flows.preflight.rewards import code_notes, try_rewards
from flows.server.reachable import require_pools, require_server, require_ui, server_url, workers_online
from grpo_core.errors import InputError
from grpo_core.hub import cached_folder, download_command, one_message, plan_download
from grpo_core.policies.estimate import MemoryEstimate
from grpo_core.policies.protocol import policy_family
from grpo_core.rollouts.streams import ImageSize
from tasks.models.initial import training_choices
from tasks.reports.report import Report
from tasks.reports.text import counted
from tasks.rollouts.engines import uses_resident_policy
from tasks.runs.stored_policies import adapter_version
from tasks.storage.artifacts.store import open_store

TRIED = "models like this one are tried by this project's tests"
UNTRIED = "models like this one are not tried by this project's tests: `grpo doctor --load` loads it and tries it here"


@dataclass(frozen=True)
class Diagnosis:
    """The results of all checks, one verdict a subject, and the memory where the model's configuration can be read.

    Attributes:
        loaded: what a loaded model took; None where none was loaded.
    """

    findings: tuple[Finding, ...]
    memory: MemoryEstimate | None
    loaded: LoadedTrial | None = None

    @property
    def healthy(self) -> bool:
        """Whether a run could start."""
        return all(finding.healthy for finding in self.findings)

    def with_problems(self, subject: str, errors: Iterable[InputError]) -> "Diagnosis":
        """Add what else is wrong."""
        return replace(self, findings=(*self.findings, *_problems(subject, errors)))

    def report(self, *, tables: bool = False) -> Report:
        """Return each finding with its hint, and the verdict; with `tables` the memory by part and phase too."""
        notes = []
        for each in self.findings:
            notes += [f"{'ok' if each.healthy else 'problem':<7} {each.subject}: {each.message}"]
            notes += [f"        {line}" for line in (each.hint, *each.notes) if line]
        problems = sum(not each.healthy for each in self.findings)
        notes.append(f"{counted(problems, 'problem')} to fix first" if problems else "ready to train")
        memory = self.memory if tables else None
        shown = [memory_table(memory)] if memory else []
        shown += [self.loaded.table] if self.loaded else []
        return Report("", tables=shown, notes=notes)


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
    notes["work"] = config.cautions
    for subject, check in CHECKS.items():
        found = _problems(subject, check(config, prompts))
        if not found and subject == "rewards":
            found = _rewards(config, prompts, report_progress, every=load)
        findings += found or [Finding(subject, True, _ready(subject, config, prompts))]
    memory: MemoryEstimate | None = None
    checkpoint = states = 0
    sizes: Counter[ImageSize] = Counter()
    # What is wrong with the model, or with the sizes that it is to generate, has been reported.
    if all(finding.healthy for finding in findings if finding.subject == "model"):
        sizes = prompts.by_size
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
            memory = on_this_machine(config, memory, moved)
            model = f"{policy.model}: {estimate.counted}"
            missing = None if weights.problem is None else weights.problem.hint
            findings += [
                Finding("weights", missing is None, model, missing or ""),
                compare_memory(config, memory, moved),
            ]
            notes["memory"] = (largest_phase(memory), *rewards_beside(config, memory))
            if sizes:
                findings.append(describe_sizes(sizes, estimate.tokens))
            findings += refused
        except InputError as error:
            # What is not here cannot be read.
            unread = error if weights.described else weights.problem
            findings += _problems("model", unread.errors if unread is not None else ())
            if unread is None:
                findings.append(Finding("weights", True, f"{config.policy.model}, which is checked once it is here"))
    loaded = None
    if load and all(finding.healthy for finding in findings):
        report_progress(f"loading {config.policy.model}")
        try:
            loaded = try_loaded(config, prompts)
            findings.append(Finding("trial", True, loaded.message, notes=loaded.notes))
        except InputError as error:
            findings += _problems("trial", error.errors)
    if all(finding.healthy for finding in findings if finding.subject == "storage"):
        findings.append(compare_disk(config, checkpoint, states, sizes))
    findings += [Finding("work", True, describe_work(config)), find_fonts(config, prompts), *_server(config)]
    return Diagnosis(_one_verdict_each(findings, notes), memory, loaded)


def _prompt_length(config: RunConfig, prompts: PromptFiles) -> tuple[int | None, list[Finding]]:
    """Return the ids of the longest prompt, as far as they are known, and what is wrong with prompts."""
    try:
        return refuse_prompt_texts(config, prompts), []
    except InputError as error:
        return None, _problems("model", error.errors)


def _one_verdict_each(findings: Sequence[Finding], notes: Mapping[str, tuple[str, ...]]) -> tuple[Finding, ...]:
    """Leave out what is right with a subject that has a problem; notes of a subject go to its last finding."""
    verdicts: list[Finding] = []
    for subject in dict.fromkeys(each.subject for each in findings):
        own = [each for each in findings if each.subject == subject]
        *first, last = [each for each in own if not each.healthy] or own
        verdicts += [*first, replace(last, notes=(*last.notes, *notes.get(subject, ())))]
    return tuple(verdicts)


def _problems(subject: str, errors: Iterable[InputError]) -> list[Finding]:
    return [Finding(subject, False, f"{error.place}: got {error.value!r}", error.hint) for error in errors]


def _ready(subject: str, config: RunConfig, prompts: PromptFiles) -> str:
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


def _rewards(
    config: RunConfig, prompts: PromptFiles, report_progress: Callable[[str], None], *, every: bool
) -> list[Finding]:
    """Call functions of the user, or every reward, once; return how training would refuse them or which are ready."""
    trials = list(try_rewards(config, prompts, report_progress, every=every))
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


@dataclass(frozen=True)
class ModelWeights:
    """Why a run cannot have the weights, whether files here describe the model, and what a start downloads."""

    problem: InputError | None = None
    described: bool = True
    notes: tuple[str, ...] = ()


def find_weights(config: RunConfig) -> ModelWeights:
    """Find the weights; of a model that is on the Hub only, what describes it is downloaded for the other checks."""
    model, revision, source = config.policy.model, config.policy.revision, source_of(config)
    if (folder := Path(source).expanduser()).is_dir():
        hint = "The folder holds no weights; save the model there."
        return ModelWeights(None if any(folder.rglob("*.safetensors")) else InputError("policy.model", model, hint))
    if cached_folder(model, revision) is not None:
        return ModelWeights()
    from huggingface_hub import constants

    try:
        with one_message("policy.model", model, model, download_command(model, revision)):
            download = plan_download(model, revision)
            download.run(weights=False)
    except InputError as error:
        return ModelWeights(error, described=False)
    note = f"they are not here yet: `grpo train` downloads {download} from the Hugging Face Hub into"
    # Checks find the files of a branch or commit only with its weights.
    return ModelWeights(None, revision is None, (f"{note} {constants.HF_HUB_CACHE}",))
