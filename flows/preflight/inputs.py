"""Checks of everything that a configuration points to, before a model loads, a server starts or a file is written.

`CHECKS` change nothing and do not import Prefect: `grpo doctor` shows what they find, and a run refuses to start.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch

from configs.contradictions import contradictions, pools_of
from configs.schema import RunConfig
from configs.scoring import RewardSection
from configs.sections import DatasetSection, LoraSection
from configs.validation import error_at
from flows.preflight.sizes import default_size, generation_problems, scoring_problems
from flows.server.reachable import require_pools, require_server, require_ui
from flows.tracking.available import tracker_problems
from grpo_core.errors import InputError, InputErrors, raise_all
from grpo_core.optimizer import refuse_unavailable
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained import LoraSettings, refuse_unavailable_attention
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import Reward
from grpo_core.seeds import derive_seed
from tasks.models.files import local_source
from tasks.models.initial import initial_digest, training_choices
from tasks.models.resident import ModelSpec, torch_device
from tasks.prompts.curriculum import PromptSet
from tasks.prompts.hub import DatasetChoice
from tasks.prompts.read import LONG_PROMPT, PromptFile, read_prompts
from tasks.prompts.sizes import read_sizes
from tasks.prompts.targets import pair_targets
from tasks.runs.stored import adapter_version
from tasks.storage.artifacts.store import ArtifactStore, open_store
from tasks.update.job import refuse_unusable_placement

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True)
class RunInputs:
    """The checked inputs of a run: its folder, unchanged, the model, and the prompts.

    `notes` say what a person should know about inputs that can be used.
    """

    store: ArtifactStore
    model: ModelSpec
    training: tuple[PromptSet, ...]
    heldout: tuple[PromptSet, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PromptFiles:
    """The prompt files of a configuration, each read once.

    Attributes:
        sets: the prompt sets of each section, one entry per dataset; None where its file or a target cannot be used.
        problems: why sets cannot be used.
        notes: what a person should know about sets that can be used: a column that was found, prompts that are long.
    """

    sets: Mapping[str, tuple[PromptSet | None, ...]]
    problems: tuple[InputError, ...]
    notes: tuple[str, ...]

    def usable(self, section: str) -> tuple[PromptSet, ...]:
        """The sets of a section that could be read."""
        return tuple(each for each in self.sets[section] if each is not None)


def checked_once(check: Callable[[A], R]) -> Callable[[A], R]:
    """Keep the result of a check for this object, so that a flow gets what the command line has checked before it."""
    last: ContextVar[tuple[A, R] | None] = ContextVar(check.__name__, default=None)

    @functools.wraps(check)
    def checked(argument: A) -> R:
        known = last.get()
        if known is None or known[0] is not argument:
            known = (argument, check(argument))
            last.set(known)
        return known[1]

    return checked


@checked_once
def check_inputs(config: RunConfig) -> RunInputs:
    """Check all inputs of a run.

    A model named by a hub id may be downloaded, and a probe is written to the storage root.

    Raises:
        InputErrors: with one entry per problem; an unreachable server and missing pools are reported when nothing
            else is wrong.
    """
    prompts = run_checks(config)
    try:
        require_pools(pools_of(config))
        if config.guardrails.on_fall == "pause":
            require_ui("guardrails.on_fall", "pause")
        # A hub name may be downloaded here, so everything else has been checked.
        store = open_store(config.storage, config.run.name)
        model = trained_model(config)
        # What was downloaded can be read, and it is not loaded yet.
        raise_all(_model_problems(config, prompts))
        refuse_prompt_texts(config, (*prompts.usable("data"), *prompts.usable("evaluate")))
        with training_choices(config.policy, store, model.adapter) as choices:
            for choice in choices.values():
                _refuse_stored_settings(config, choice.lora)
            notes = policy_family(config.policy.kind).check_choices(source_of(config), choices)
        store.require_writable()
        if config.storage.cache_dir is not None and store.files.cache is not None:
            store.files.cache.require_usable()
        # Last, since it imports Prefect, which takes seconds.
        require_server()
    except InputError as error:
        raise InputErrors([error]) from error
    return RunInputs(store, model, prompts.usable("data"), prompts.usable("evaluate"), (*prompts.notes, *notes))


def run_checks(config: RunConfig) -> PromptFiles:
    """Run all `CHECKS` and return the prompts that they read.

    Raises:
        InputErrors: with one entry per problem.
    """
    prompts = read_prompt_files(config)
    raise_all(problem for check in CHECKS.values() for problem in check(config, prompts))
    return prompts


def _refuse_stored_settings(config: RunConfig, stored: LoraSettings | None) -> None:
    """Refuse an adapter to start from whose own settings contradict the configuration, as those of `policy.lora` would.

    Raises:
        InputErrors: with one entry per contradiction.
    """
    if config.policy.adapter is None or stored is None:
        return
    policy = config.policy.model_copy(update={"lora": LoraSection(**asdict(stored))})
    raise_all(contradictions(config.model_copy(update={"policy": policy})))


def refuse_prompt_texts(config: RunConfig, sets: Sequence[PromptSet]) -> None:
    """Raise InputError when the model cannot read one of the prompts; only its tokenizer is loaded."""
    family = policy_family(config.policy.kind)
    texts = [prompt.text for each in sets for prompt in each.prompts]
    family.refuse_prompts(source_of(config), config.rollout, texts)


def trained_model(config: RunConfig) -> ModelSpec:
    """Describe the model that a run trains; a hub name may be downloaded.

    Raises:
        InputError: its files, or those of its adapter, cannot be found.
    """
    adapter = adapter_version(config)
    return ModelSpec(
        section=config.policy,
        digest=initial_digest(config.policy, open_store(config.storage, config.run.name), adapter),
        adapter_seed=derive_seed(config.run.seed, "adapter"),
        references=config.references,
        adapter=adapter,
    )


def source_of(config: RunConfig) -> str:
    """Return the folder or hub name that the model is loaded from."""
    return local_source(config.policy.model, config.policy.revision)


def read_prompt_files(config: RunConfig) -> PromptFiles:
    """Read the training and held-out prompts with their targets; a later rescoring may need those."""
    sets: dict[str, tuple[PromptSet | None, ...]] = {}
    problems: list[InputError] = []
    notes: list[str] = []
    for name, section in config.prompt_sections.items():
        read: list[PromptSet | None] = []
        for own, dataset in section.placed(name):
            try:
                file, prompts = _read_prompt_set(config, dataset)
            except InputError as error:
                problems.append(InputError(error.place.replace("data.", f"{own}.", 1), error.value, error.hint))
                read.append(None)
                continue
            read.append(prompts)
            notes += [f"{own}.prompts: {dataset.prompts}: {note}" for note in _notes(dataset, file, prompts)]
        sets[name] = tuple(read)
    return PromptFiles(sets, tuple(problems), tuple(notes))


def _read_prompt_set(config: RunConfig, dataset: DatasetSection) -> tuple[PromptFile, PromptSet]:
    """Return the file as it was read, and its prompts with their targets and sizes."""
    column = dataset.target_column
    roles = () if column is None else (column,)
    choice = DatasetChoice(dataset.split, dataset.subset, dataset.revision, dataset.streaming)
    file = read_prompts(
        dataset.prompts,
        column=dataset.prompt_column,
        columns=dataset.columns,
        also=roles,
        limit=dataset.limit if dataset.streaming else None,
        choice=choice,
    )
    default = default_size(config, dataset)
    # Of a text model, columns of these names are ordinary ones.
    sizes = read_sizes(file.prompts, source=dataset.prompts, default=default) if default else ()
    # Images of a folder pair with all prompts of the file, so the limit comes last.
    targets = pair_targets(file.prompts, folder=dataset.targets, column=column, base=file.folder, sizes=sizes)
    within = slice(dataset.limit)
    limited = PromptSet(dataset.name, dataset.weight, file.prompts[within], targets[within], sizes[within])
    return file, limited


def _notes(dataset: DatasetSection, file: PromptFile, prompts: PromptSet) -> Iterator[str]:
    if dataset.prompt_column is None and file.column != "prompt":
        yield f"the prompts are column {file.column}"
    if file.commit is not None and file.commit != dataset.revision:
        yield f"commit {file.commit}; set revision to it, and the prompts stay these when the dataset changes"
    lengths = {row: len(prompt.text) for row, prompt in enumerate(prompts.prompts, start=1)}
    longer = [row for row, length in lengths.items() if length > LONG_PROMPT]
    if longer:
        row = max(longer, key=lengths.__getitem__)
        others = f"; {len(longer) - 1} more have over {LONG_PROMPT}" if len(longer) > 1 else ""
        yield (
            f"prompt {prompts.prompts[row - 1].prompt_id} (row {row}) has {lengths[row]} characters{others}: "
            "memory and time grow with the longest prompt"
        )


def _prompt_problems(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    yield from prompts.problems


def _model_problems(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    family = policy_family(config.policy.kind)
    try:
        family.refuse_missing(source_of(config))
        family.refuse_unusable(source_of(config), config.rollout)
        _refuse_evaluation(config)
    except InputError as error:
        yield error
        return
    yield from generation_problems(config, prompts.sets)


def _refuse_evaluation(config: RunConfig) -> None:
    """Raise InputError if the model cannot sample held-out prompts with the settings that only they have."""
    try:
        policy_family(config.policy.kind).refuse_unusable(source_of(config), config.evaluation_rollout)
    except InputError as error:
        field = error.place.removeprefix("rollout.")
        own = getattr(config.evaluate, field, None) is not None
        raise InputError(f"evaluate.{field}" if own else error.place, error.value, error.hint) from error


def _reward_problems(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Rewards score training and held-out samples, guardrails only the latter."""
    scored: list[tuple[str, RewardSection, Sequence[str]]] = [
        *((f"rewards.{index}", each, ("data", "evaluate")) for index, each in enumerate(config.rewards)),
        *((f"guardrails.rewards.{index}", each, ("evaluate",)) for index, each in enumerate(config.guardrails.rewards)),
    ]
    for place, section, parts in scored:
        reward = build_reward(section.reward, section.settings)
        columns = {*filter(None, [reward.needs_column]), *(section.where or {})}
        for column in sorted(columns):
            yield from _column_problems(config, prompts, section, f"{place}.{section.label}", column, parts)
        for problem in reward.preflight():
            yield InputError(f"{place}.{section.label}", dict(section.settings), problem)
        yield from token_problems(config, section, reward, f"{place}.{section.label}")
        yield from scoring_problems(config, prompts.sets, section, place, parts)


def token_problems(config: RunConfig, section: RewardSection, reward: Reward, place: str) -> Iterator[InputError]:
    """Report a reward that cannot score a sample without its tokens, where none are sampled."""
    if reward.requires_tokens and "tokens" not in policy_family(config.policy.kind).streams:
        hint = f"It needs completion_ids, and a policy of kind {config.policy.kind} samples no tokens; give the "
        yield InputError(place, section.reward, f"{hint}parameter a default, or choose another reward.")


def _column_problems(
    config: RunConfig, prompts: PromptFiles, section: RewardSection, place: str, column: str, parts: Sequence[str]
) -> Iterator[InputError]:
    """Report a column that no prompt has, in a dataset that the reward scores."""
    for part in parts:
        for dataset, known in zip(config.prompt_sections[part].sets, prompts.sets[part], strict=True):
            if known is None or not section.scores(dataset.name):
                continue
            found = sorted({name for prompt in known.prompts for name in prompt.columns})
            if column not in found:
                hint = f"No prompt of {part} ({dataset.prompts}) has this column; it has {', '.join(found) or 'none'}."
                if dataset.columns is not None and column not in dataset.columns:
                    hint += f" Only those listed as {part}.columns go along: add it there."
                yield InputError(place, column, hint)


def _device_problems(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    device, placement = config.placement.device, config.placement
    if placement.rollouts.pool and placement.update.pool:
        # The device is that of the workers, which report when it is missing.
        return
    if device == "cuda" and not torch.cuda.is_available():
        yield InputError("placement.device", "cuda", "PyTorch finds no CUDA device here. Set it to auto or cpu.")
        return
    if placement.update.pool:
        # The rest depends on the worker's machine.
        return
    checks = [
        partial(refuse_unavailable_attention, config.policy.attn_implementation),
        partial(refuse_unusable_placement, placement, config.updates),
    ]
    for check in checks:
        try:
            check()
        except InputError as error:
            yield error
    for stream, update in config.updates.items():
        try:
            refuse_unavailable(update.optimizer, torch_device(placement))
        except InputError as error:
            yield error_at(config.update_path(stream), error)


def _storage_problems(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    try:
        open_store(config.storage, config.run.name)
    except InputError as error:
        yield error


def _tracker_problems(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    yield from tracker_problems(config.run.trackers)


Check = Callable[[RunConfig, PromptFiles], Iterator[InputError]]

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "prompts": _prompt_problems,
        "model": _model_problems,
        "rewards": _reward_problems,
        "device": _device_problems,
        "storage": _storage_problems,
        "trackers": _tracker_problems,
    }
)
"""Checks by subject that load no model, write no file and do not import Prefect."""
