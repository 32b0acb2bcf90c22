"""Sizes of images that the model cannot generate, or that a reward cannot score."""

from collections.abc import Callable, Collection, Iterator, Mapping

from configs.schema import RunConfig
from configs.scoring import RewardSection
from configs.sections import DatasetSection, ImageRolloutSection
from grpo_core.errors import InputError
from grpo_core.image_size import ImageSize
from grpo_core.policies.protocol import policy_family
from grpo_core.rewards.images import fits_reward, shown_bounds
from grpo_core.rewards.registry import build_reward
from tasks.models.files import local_source
from tasks.prompts.curriculum import PromptSet
from tasks.prompts.read import Prompt
from tasks.prompts.sizes import size_place

Sets = Mapping[str, tuple[PromptSet | None, ...]]
"""The prompt sets of each section, one entry per dataset; None where its file cannot be used."""

MAX_PROBLEMS = 5
"""Maximum number of sizes that are reported at once; a file may have another one in each row."""


def default_size(config: RunConfig, dataset: DatasetSection) -> ImageSize | None:
    """Return the size of images whose row gives none; None for texts."""
    if not isinstance(config.rollout, ImageRolloutSection):
        return None
    if dataset.width is not None and dataset.height is not None:
        return ImageSize(dataset.width, dataset.height)
    return config.rollout.size


def generation_problems(config: RunConfig, sets: Sets) -> list[InputError]:
    """Return an error for each size that the model cannot generate, with the nearest that it can."""
    refuse = policy_family(config.policy.kind).refuse_unusable
    source = local_source(config.policy.model, config.policy.revision)
    problems = []
    for size, where in _sizes(config, sets, sets):
        try:
            refuse(source, config.rollout.model_copy(update=size._asdict()))
        except InputError as error:
            problems.append(InputError(where, str(size), error.hint))
    return _first(problems)


def scoring_problems(
    config: RunConfig, sets: Sets, section: RewardSection, place: str, parts: Collection[str]
) -> list[InputError]:
    """Return an error for each size of images that a reward is meant for and cannot score."""
    reward = build_reward(section.reward, section.settings)
    problems = []

    def meant(dataset: str, prompt: Prompt) -> bool:
        return section.scores_prompt(dataset, prompt.columns)

    for size, where in _sizes(config, sets, parts, meant):
        if not fits_reward(size, reward.min_side, reward.max_aspect):
            hint = f"It needs {shown_bounds(reward.min_side, reward.max_aspect)}; this is the size of {where}."
            problems.append(InputError(f"{place}.reward", f"{section.reward} of {size} pixels", hint))
    return _first(problems)


def _first(problems: list[InputError]) -> list[InputError]:
    """Return the first problems; the last of them says how many there are besides."""
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return problems
    *shown, last = problems[:MAX_PROBLEMS]
    return [*shown, InputError(last.place, last.value, f"{last.hint} {more} more sizes are refused.")]


def _sizes(
    config: RunConfig, sets: Sets, parts: Collection[str], meant: Callable[[str, Prompt], bool] = lambda *_: True
) -> Iterator[tuple[ImageSize, str]]:
    """Yield each size of each dataset once, with the place that gives it: its first row, or a section.

    Args:
        meant: says of a dataset's name and a prompt whether it counts.
    """
    for part in parts:
        for (own, dataset), known in zip(config.prompt_sections[part].placed(part), sets[part], strict=True):
            default = "rollout" if dataset.width is None else own
            rows: dict[ImageSize, int] = {}
            # Texts have no sizes.
            for row, (prompt, size) in enumerate(zip(known.prompts, known.sizes, strict=False), 1) if known else ():
                if size not in rows and meant(dataset.name, prompt):
                    rows[size] = row
            for size, row in rows.items():
                by_row = size_place(dataset.prompts, row).replace("data.", f"{own}.", 1)
                yield size, f"{default}.width and height" if size == default_size(config, dataset) else by_row
