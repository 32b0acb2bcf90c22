"""Checks of the rewards and of the prompts that they score; a trial of them."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from PIL import Image

from configs.schema import RunConfig
from configs.scoring import RewardSection
from flows.preflight.prompts import PromptFiles, first_of, sizes_of
from grpo_core.errors import InputError
from grpo_core.losses.settings import load_custom_loss
from grpo_core.policies.protocol import policy_family
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import Needs, Reward
from grpo_core.rollouts.images import SourceImage, encode_png, fits_reward, require_aspect, shown_bounds
from grpo_core.rollouts.streams import ImageSize
from tasks.prompts.read import Prompt
from tasks.prompts.targets import size_place
from tasks.reports.text import number

TRIAL = "trial sample"
"""How the samples of a trial are named in errors."""

MADE_UP = "It was called with two made-up samples of a prompt; those of a run can differ."

_TEXTS = ("a short answer", "another answer of six whole words")


@dataclass(frozen=True)
class Trial:
    """One call of a reward as training calls it, with two made-up siblings.

    Attributes:
        called: whether there was a prompt that it scores.
        problem: how training would refuse what the reward raised or returned, or that no sample could be scored.
        outcome: their scores, or why they have none, and the seconds with those of loading, for people.
    """

    label: str
    called: bool
    problem: InputError | None = None
    outcome: str = ""


def try_rewards(
    config: RunConfig, prompts: PromptFiles, report_progress: Callable[[str], None], *, every: bool = False
) -> Iterator[Trial]:
    """Call each function of the user, or every reward, once with two made-up siblings of the first prompt it scores."""
    built = [(each, build_reward(each[1].reward, each[1].settings)) for each in _scored(config)]
    waiting = []
    for (place, section, parts), reward in built:
        if not every and reward.user_function is None:
            continue
        rows = next(_siblings(config, prompts, section, reward, parts), None)
        if rows is None:
            yield Trial(section.label, False, outcome="no prompt is in its scope")
        elif reward.load_needs().tokens == "required" and "token_ids" not in rows[0]:
            yield Trial(section.label, False, outcome="it needs completion_ids, and the model is not on this machine")
        else:
            waiting.append((f"{place}.{section.label}", section, reward, rows))
    if waiting:
        report_progress(f"calling {', '.join(each[2].user_function or each[1].reward for each in waiting)} ...")
    for place, section, reward, rows in waiting:
        yield _try(place, section, reward, rows)


def _try(place: str, section: RewardSection, reward: Reward, rows: Sequence[Mapping[str, Any]]) -> Trial:
    # torch is imported there, which no check of a run's start needs so early.
    from tasks.rewards.score_rows import score_rows

    try:
        scores = score_rows(reward, section, rows)
    except InputError as error:
        return Trial(section.label, True, InputError(error.place, error.value, f"{error.hint} {MADE_UP}"))
    if all(score["failure"] for score in scores):
        hint = f"Samples like this one have no score, and training stops at too many of them. {MADE_UP}"
        return Trial(section.label, True, InputError(place, scores[0]["failure"], hint))
    shown = [score["failure"] or _shown(score["value"]) for score in scores]
    outcome = ", ".join(shown if shown[0] != shown[1] else shown[:1])
    seconds = sum(score["seconds"] for score in scores)
    return Trial(section.label, True, outcome=f"called with two trial samples: {outcome} ({seconds:.2g} s)")


def _shown(value: float | None) -> str:
    return "none (not applicable)" if value is None else number(value)


def _siblings(
    config: RunConfig, prompts: PromptFiles, section: RewardSection, reward: Reward, parts: Sequence[str]
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield two made-up stored rows for each prompt that a reward scores."""
    for known in (each for part in parts for each in prompts.usable(part)):
        for index, prompt in enumerate(known.prompts):
            if not section.scores_prompt(known.name, prompt.columns):
                continue
            target, size = known.targets[index], known.sizes[index] if known.sizes else None
            sources = prompt.sources if reward.load_needs().sources else ()
            row = {
                "group_id": TRIAL,
                "dataset": known.name,
                "prompt": prompt.text,
                "columns": json.dumps(prompt.columns),
                "target_uri": target and target.uri,
                "target_sha256": target and target.sha256,
                "sources": [SourceImage.of(each.load()) for each in sources],
            }
            outputs = [_output(config, reward, size, bool(prompt.sources), sibling) for sibling in (1, 2)]
            yield [{**row, **output, "sample_id": f"{TRIAL} {n}"} for n, output in enumerate(outputs, 1)]


def _output(
    config: RunConfig, reward: Reward, size: ImageSize | None, edited: bool, sibling: int
) -> Mapping[str, object]:
    """Make up the columns of what a policy generates, another for each sibling."""
    output: ImageSize | str = _TEXTS[sibling - 1] if size is None else size
    row: dict[str, object] = {"completion": output}
    if size is not None:
        coarse = np.random.default_rng(sibling).integers(0, 256, (4, 4, 3), np.uint8)
        image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        row = {"image": {"bytes": encode_png(image)}, "defect": None}
    if reward.needs.tokens is None:
        return row
    # It imports torch, as the scoring of rows does.
    from flows.preflight.model import source_of

    family, model = policy_family(config.policy.kind), source_of(config)
    try:
        ids = family.example_ids(model, config.rollout, output, edited=edited, seed=sibling)
    except InputError:
        # The check of the model reports it.
        ids = None
    return row if ids is None else {**row, "token_ids": ids}


def _scored(config: RunConfig) -> list[tuple[str, RewardSection, Sequence[str]]]:
    """List the rewards and guardrails with their paths and the parts of the prompts whose samples they score."""
    return [
        *((f"rewards.{index}", each, ("data", "evaluate")) for index, each in enumerate(config.rewards)),
        *((f"guardrails.rewards.{index}", each, ("evaluate",)) for index, each in enumerate(config.guardrails.rewards)),
    ]


def code_notes(config: RunConfig) -> tuple[str, ...]:
    """Name what the user's functions use and no key sees, such as data that they read when they are imported."""
    found = []
    for place, section, _ in _scored(config):
        reward = build_reward(section.reward, section.settings)
        if reward.unfollowed:
            unseen = ", ".join(reward.unfollowed)
            hint = "set settings.revision to another text when one of them does"
            found.append(f"{place}.{section.label}, {reward.user_function}: no key sees a change of {unseen}; {hint}")
    for stream, update in config.updates.items():
        if update.custom_loss is not None and (unseen := ", ".join(load_custom_loss(update.objective).unfollowed)):
            place = f"{config.update_path(stream)}.loss, {update.objective}"
            found.append(f"{place}: no key sees a change of {unseen}; train a new run when one of them changes")
    return tuple(found)


def check_rewards(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Rewards score training and held-out samples, guardrails only the latter."""
    for place, section, parts in _scored(config):
        reward = build_reward(section.reward, section.settings)
        needs = reward.load_needs()
        columns = {*filter(None, [needs.column]), *(section.where or {})}
        for column in sorted(columns):
            yield from _column_problems(config, prompts, section, f"{place}.{section.label}", column, parts)
        yield from reward_problems(place, section, reward)
        yield from token_problems(config, section, reward, f"{place}.{section.label}")
        yield from _source_problems(config, prompts, section, needs, f"{place}.{section.label}", parts)
        yield from _size_problems(config, prompts, section, needs, place, parts)
        yield from _prompt_problems(config, prompts, section, reward, parts)


def reward_problems(place: str, section: RewardSection, reward: Reward) -> Iterator[InputError]:
    """Report what a reward needs and this machine lacks; `place` is the path of its section."""
    for problem in reward.preflight():
        yield InputError(f"{place}.{section.label}", dict(section.settings), problem)


def token_problems(config: RunConfig, section: RewardSection, reward: Reward, place: str) -> Iterator[InputError]:
    """Report a reward that cannot score a sample without its tokens, where none are sampled."""
    if reward.load_needs().tokens == "required" and "tokens" not in policy_family(config.policy.kind).streams:
        hint = f"It needs completion_ids, and a policy of kind {config.policy.kind} samples no tokens; give the "
        yield InputError(place, section.reward, f"{hint}parameter a default, or choose another reward.")


def _source_problems(
    config: RunConfig, prompts: PromptFiles, section: RewardSection, needs: Needs, place: str, parts: Sequence[str]
) -> Iterator[InputError]:
    """Report a reward that must see the images in prompts, where those of a dataset that it scores do not fit it."""
    for part in parts if needs.sources == "required" else ():
        for (own, dataset), known in zip(config.prompt_sections[part].placed(part), prompts.sets[part], strict=True):
            if known is None or not section.scores(dataset.name):
                continue
            if not any(each.sources for each in known.prompts):
                hint = f"It needs images in prompts, and none of {part} ({dataset.prompts}) has any; name their "
                other = ", or give source_images a default" if needs.source is None else ""
                yield InputError(place, section.reward, f"{hint}image_column{other}.")
                continue
            scored = (
                (prompt, size)
                for prompt, size in zip(known.prompts, known.sizes, strict=False)
                if section.scores_prompt(dataset.name, prompt.columns)
            )
            problems = (_source_problem(prompt, size, needs, f"{place}, {own}") for prompt, size in scored)
            # In a file with one such prompt the others are mostly alike.
            yield from islice((each for each in problems if each is not None), 1)


def _column_problems(
    config: RunConfig, prompts: PromptFiles, section: RewardSection, place: str, column: str, parts: Sequence[str]
) -> Iterator[InputError]:
    for part in parts:
        for dataset, known in zip(config.prompt_sections[part].sets, prompts.sets[part], strict=True):
            if known is None or not section.scores(dataset.name):
                continue
            found = sorted({name for prompt in known.prompts for name in prompt.columns})
            if column not in found:
                has = ", ".join(found) or "none"
                hint = f"No prompt of {part} ({dataset.prompts}) has the column {column}; it has {has}."
                if dataset.columns is not None and column not in dataset.columns:
                    hint += f" Only those listed as {part}.columns go along: add it there."
                yield InputError(place, column, hint)


def _source_problem(prompt: Prompt, size: ImageSize, needs: Needs, place: str) -> InputError | None:
    """Return why the reward cannot compare an image of this size with its image in the prompt; None if it can."""
    index = needs.source
    if index is None:
        return None
    if len(prompt.sources) <= index:
        hint = f"The reward compares with image {index + 1} of each prompt; give this one that many, or leave it out."
        return InputError(f"{place}, prompt {prompt.prompt_id}", f"{len(prompt.sources)} images", hint)
    source = prompt.sources[index]
    try:
        if needs.squeezes_reference:
            require_aspect(source.size, size, place)
    except InputError as error:
        return InputError(f"{place}, {source.place}", f"image of {source.size} pixels", error.hint)
    return None


def _size_problems(
    config: RunConfig,
    prompts: PromptFiles,
    section: RewardSection,
    needs: Needs,
    place: str,
    parts: Collection[str],
) -> list[InputError]:
    """Return an error for each size of images that a reward is meant for and cannot score."""
    problems = []

    def meant(dataset: str, prompt: Prompt) -> bool:
        return section.scores_prompt(dataset, prompt.columns)

    for size, where in sizes_of(config, prompts, parts, meant):
        if not fits_reward(size, needs.min_side, needs.max_aspect):
            hint = f"It needs {shown_bounds(needs.min_side, needs.max_aspect)}; this is the size of {where}."
            problems.append(InputError(f"{place}.reward", f"{section.reward} of {size} pixels", hint))
    return first_of(problems)


def _prompt_problems(
    config: RunConfig, prompts: PromptFiles, section: RewardSection, reward: Reward, parts: Collection[str]
) -> list[InputError]:
    problems = []
    for part in parts:
        for (own, dataset), known in zip(config.prompt_sections[part].placed(part), prompts.sets[part], strict=True):
            for row, prompt in enumerate(known.prompts, 1) if known else ():
                if not section.scores_prompt(dataset.name, prompt.columns):
                    continue
                try:
                    reward.check_prompt(prompt.columns, [source.size for source in prompt.sources], prompt.text)
                except InputError as error:
                    place = size_place(dataset.prompts, row).replace("data.", f"{own}.", 1)
                    problems.append(InputError(f"{place}, {error.place}", error.value, error.hint))
    return first_of(problems, "rows")
