"""What a configuration points at, read and checked before a model loads, a server starts or a file is written."""

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from configs.schema import DataSection, EvaluateSection, RunConfig
from grpo_core.errors import InputError, InputErrors
from grpo_core.policies.glm_image.folder import read_pixel_unit, refuse_missing_folder
from grpo_core.policies.glm_image.geometry import token_grids
from grpo_core.rewards.registry import build_reward
from tasks.model_files import model_digest
from tasks.prompts import Prompt, read_prompts
from tasks.storage.store import ArtifactStore
from tasks.targets import TargetReference, pair_targets


@dataclass(frozen=True)
class PromptSet:
    """Prompts with the pictures they ought to give."""

    prompts: tuple[Prompt, ...]
    targets: tuple[TargetReference | None, ...]


def compares_with_targets(config: RunConfig) -> bool:
    """Whether any reward of the mix needs target pictures; where none does, none are read."""
    return any(build_reward(section.reward, section.settings).needs_target for section in config.rewards)


def read_prompt_set(section: DataSection | EvaluateSection, place: str, *, with_targets: bool) -> PromptSet:
    """The prompts of one section, with their targets if those are wanted.

    Raises:
        InputError: a file or picture that is missing or cannot be used; `place` names the section.
    """
    assert section.prompts is not None
    try:
        # Pictures of a folder pair with the whole file, so the limit comes last.
        prompts = read_prompts(section.prompts, column=section.prompt_column)
        targets: tuple[TargetReference | None, ...] = (None,) * len(prompts)
        if with_targets:
            base = posixpath.dirname(section.prompts)
            targets = pair_targets(prompts, folder=section.targets, column=section.target_column, base=base)
    except InputError as error:
        raise InputError(error.place.replace("data.", f"{place}.", 1), error.value, error.mend) from error
    return PromptSet(prompts[: section.limit], targets[: section.limit])


def input_problems(config: RunConfig) -> Iterator[InputError]:
    """Everything that can be known to be wrong without loading a model or writing a file."""
    yield from _prompt_problems(config)
    try:
        refuse_missing_folder(config.policy.model)
        _require_drawable_size(config)
    except InputError as error:
        yield error
    yield from _reward_problems(config)
    if config.placement.device == "cuda" and not torch.cuda.is_available():
        yield InputError("placement.device", "cuda", "PyTorch finds no CUDA device here. Set it to auto or cpu.")


def _require_drawable_size(config: RunConfig) -> None:
    unit = read_pixel_unit(config.policy.model)
    if unit is not None:
        token_grids(config.rollout.height, config.rollout.width, unit)


def _prompt_problems(config: RunConfig) -> Iterator[InputError]:
    sections: list[tuple[DataSection | EvaluateSection, str]] = [(config.data, "data")]
    if config.evaluate.prompts is not None:
        sections.append((config.evaluate, "evaluate"))
    for section, place in sections:
        try:
            read_prompt_set(section, place, with_targets=compares_with_targets(config))
        except InputError as error:
            yield error


def _reward_problems(config: RunConfig) -> Iterator[InputError]:
    side = min(config.rollout.height, config.rollout.width)
    for index, section in enumerate(config.rewards):
        place = f"rewards.{index}.{section.label}"
        reward = build_reward(section.reward, section.settings)
        if side < reward.min_side:
            yield InputError(place, f"{side} pixels", f"It needs pictures of at least {reward.min_side} pixels a side.")
        for problem in reward.preflight():
            yield InputError(place, dict(section.settings), problem)


def require_inputs(config: RunConfig) -> None:
    """Raise everything that is wrong at once; when all is well, make sure that the run's folder can be written.

    Raises:
        InputErrors: with one entry a problem.
    """
    problems = list(input_problems(config))
    if problems:
        raise InputErrors(problems)
    try:
        # A hub name may be downloaded here, so everything else is known to be well by now.
        model_digest(config.policy.model)
        # What was downloaded can be read now, and it is not loaded yet.
        _require_drawable_size(config)
        ArtifactStore(config.storage.root, config.run.name).require_writable()
    except InputError as error:
        raise InputErrors([error]) from error
