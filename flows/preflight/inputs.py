"""What a configuration points at, read and checked before a model loads, a server starts or a file is written."""

import posixpath
from collections.abc import Callable, Iterator, Sequence

import torch

from configs.checks import pools_of
from configs.schema import RunConfig
from configs.scoring import RewardSection
from configs.sections import DatasetSection, ImageRolloutSection, PromptsSection
from flows.server.reachable import require_pools, require_server
from grpo_core.errors import InputError, InputErrors
from grpo_core.optimizer import refuse_unavailable
from grpo_core.policies.family import policy_family
from grpo_core.rewards.registry import build_reward
from tasks.models.files import model_digest
from tasks.models.resident import torch_device
from tasks.prompts.curriculum import PromptSet
from tasks.prompts.read import read_prompts
from tasks.prompts.targets import pair_targets
from tasks.storage.artifacts.open_store import open_store
from tasks.update.job import refuse_unusable_placement


def read_prompt_sets(config: RunConfig, section: PromptsSection, place: str) -> tuple[PromptSet, ...]:
    """The prompts of one section, set by set, with their targets: a later rescoring may ask for those.

    Raises:
        InputError: a file or image that is missing or cannot be used; `place` names the section.
    """
    return tuple(_read_prompt_set(config, dataset, place) for dataset in section.sets)


def _read_prompt_set(config: RunConfig, section: DatasetSection, place: str) -> PromptSet:
    rollout = config.rollout
    size = (rollout.width, rollout.height) if isinstance(rollout, ImageRolloutSection) else None
    try:
        # Images of a folder pair with the whole file, so the limit comes last.
        prompts = read_prompts(section.prompts, column=section.prompt_column)
        base = posixpath.dirname(section.prompts)
        targets = pair_targets(prompts, folder=section.targets, column=section.target_column, base=base, size=size)
    except InputError as error:
        raise InputError(error.place.replace("data.", f"{place}.", 1), error.value, error.hint) from error
    return PromptSet(section.name, section.weight, prompts[: section.limit], targets[: section.limit])


def input_problems(config: RunConfig) -> Iterator[InputError]:
    """Everything that can be known to be wrong without loading a model or writing a file."""
    yield from _prompt_problems(config)
    try:
        policy_family(config.policy.kind).refuse_missing(config.policy.model)
        _require_usable_settings(config)
    except InputError as error:
        yield error
    yield from _reward_problems(config)
    yield from _device_problems(config)
    try:
        open_store(config.storage, config.run.name)
    except InputError as error:
        yield error


def _device_problems(config: RunConfig) -> Iterator[InputError]:
    device, placement = config.placement.device, config.placement
    if placement.rollouts.pool and placement.update.pool:
        # The device is that of the workers; they say so when it is not there.
        return
    if device == "cuda" and not torch.cuda.is_available():
        yield InputError("placement.device", "cuda", "PyTorch finds no CUDA device here. Set it to auto or cpu.")
        return
    if placement.update.pool:
        # What follows is asked of the worker's machine, which answers for itself.
        return
    checks: tuple[Callable[[], None], ...] = (
        lambda: refuse_unavailable(config.update.optimizer, torch_device(config.placement)),
        lambda: refuse_unusable_placement(config.placement, config.update),
    )
    for check in checks:
        try:
            check()
        except InputError as error:
            yield error


def _require_usable_settings(config: RunConfig) -> None:
    policy_family(config.policy.kind).refuse_unusable(config.policy.model, config.rollout)


def _prompt_problems(config: RunConfig) -> Iterator[InputError]:
    sections: tuple[tuple[PromptsSection, str], ...] = ((config.data, "data"), (config.evaluate, "evaluate"))
    for section, place in sections:
        for index, dataset in enumerate(section.sets):
            try:
                where = f"{place}.datasets.{index}" if section.datasets else place
                _read_prompt_set(config, dataset, where)
            except InputError as error:
                yield error


def _reward_problems(config: RunConfig) -> Iterator[InputError]:
    for place, section in _scored_by(config):
        reward = build_reward(section.reward, section.settings)
        columns = {reward.needs_column, *(section.where or {})} - {None}
        for column in sorted(column for column in columns if column is not None):
            parts = ("evaluate",) if place.startswith("watch.") else ("data", "evaluate")
            yield from _column_problems(config, section, f"{place}.{section.label}", column, parts)
        for problem in reward.preflight():
            yield InputError(f"{place}.{section.label}", dict(section.settings), problem)


def _scored_by(config: RunConfig) -> Iterator[tuple[str, RewardSection]]:
    """Every reward and guardrail, with its place."""
    for part, sections in (("rewards", config.rewards), ("watch.guardrails", config.watch.guardrails)):
        for index, section in enumerate(sections):
            yield f"{part}.{index}", section


def _column_problems(
    config: RunConfig, section: RewardSection, place: str, column: str, parts: Sequence[str]
) -> Iterator[InputError]:
    """A column that no prompt has, in a dataset that the reward is meant for."""
    for part, data in ((part, getattr(config, part)) for part in parts):
        for dataset in data.sets:
            if not section.scores(dataset.name):
                continue
            try:
                prompts = read_prompts(dataset.prompts, column=dataset.prompt_column)
            except InputError:
                continue  # told with the prompts
            found = sorted({name for prompt in prompts for name in prompt.columns})
            if column not in found:
                hint = f"No prompt of {part} ({dataset.prompts}) has this column; it has {', '.join(found) or 'none'}."
                yield InputError(place, column, hint)


def require_inputs(config: RunConfig) -> None:
    """Raise everything that is wrong at once; when all is well, make sure that the run's folder can be written.

    Raises:
        InputErrors: with one entry a problem; a server that cannot be reached and pools that it does not have too.
    """
    problems = list(input_problems(config))
    if problems:
        raise InputErrors(problems)
    try:
        require_pools(pools_of(config))
        # A hub name may be downloaded here, so everything else is known to be well by now.
        model_digest(config.policy.model)
        # What was downloaded can be read now, and it is not loaded yet.
        _require_usable_settings(config)
        choice = config.policy.training_choice(reference="none", seed=0)
        policy_family(config.policy.kind).refuse_choice(config.policy.model, choice)
        store = open_store(config.storage, config.run.name)
        store.require_writable()
        if config.storage.cache_dir is not None and store.files.cache is not None:
            store.files.cache.require_usable()
        # Last, since it imports Prefect, which takes seconds.
        require_server()
    except InputError as error:
        raise InputErrors([error]) from error
