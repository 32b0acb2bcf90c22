"""Rewards: whether each can be built, and can score the prompts and images that it is given."""

from collections.abc import Collection, Iterator, Sequence

from configs.schema import RunConfig
from configs.scoring import RewardSection
from flows.preflight.prompts import PromptFiles, first_sizes, sizes_of
from grpo_core.errors import InputError
from grpo_core.policies.protocol import policy_family
from grpo_core.rewards.images import fits_reward, shown_bounds
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import Reward
from tasks.prompts.read import Prompt


def check(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
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
        yield from _size_problems(config, prompts, section, reward, place, parts)


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


def _size_problems(
    config: RunConfig,
    prompts: PromptFiles,
    section: RewardSection,
    reward: Reward,
    place: str,
    parts: Collection[str],
) -> list[InputError]:
    """Return an error for each size of images that a reward is meant for and cannot score."""
    problems = []

    def meant(dataset: str, prompt: Prompt) -> bool:
        return section.scores_prompt(dataset, prompt.columns)

    for size, where in sizes_of(config, prompts, parts, meant):
        if not fits_reward(size, reward.min_side, reward.max_aspect):
            hint = f"It needs {shown_bounds(reward.min_side, reward.max_aspect)}; this is the size of {where}."
            problems.append(InputError(f"{place}.reward", f"{section.reward} of {size} pixels", hint))
    return first_sizes(problems)
