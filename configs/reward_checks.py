"""What is wrong with the rewards and guardrails of a configuration, one by one and together."""

from collections.abc import Iterator, Sequence

from configs.core_settings import advantage_settings, reward_term
from configs.reward_sections import RewardSection
from configs.schema import ImageRolloutSection, RunConfig
from grpo_core.advantages import refuse_terms
from grpo_core.errors import InputError
from grpo_core.policies.family import policy_family
from grpo_core.rewards.mix.terms import RewardTerm
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import Reward

MANIFEST_ENDING = ".manifest.json"
"""Of the file beside a stored table, whose folder has the reward's name."""

# They decide what a reward counts for, and a guardrail counts for nothing.
_OF_THE_MIX = ("weight", "role", "threshold", "clamp", "normalize", "range")


def reward_contradictions(config: RunConfig) -> Iterator[InputError]:
    """Every impossible reward or guardrail, and every impossible combination of them; nothing is read or loaded."""
    yield from _labels("rewards", config.rewards)
    yield from _mix(config)
    for index, section in enumerate(config.rewards):
        yield from _reward(config, section, f"rewards.{index}", ("data", "evaluate"))
    yield from _guardrails(config)


def _labels(place: str, sections: Sequence[RewardSection]) -> Iterator[InputError]:
    labels = [section.label for section in sections]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield InputError(place, label, "This name stands twice; give each entry a `name` of its own.")
    for label in (label for label in labels if label.endswith(MANIFEST_ENDING)):
        yield InputError(place, label, f"The manifests of stored tables end with {MANIFEST_ENDING}; name it otherwise.")


def _mix(config: RunConfig) -> Iterator[InputError]:
    terms: list[RewardTerm] = []
    for index, section in enumerate(config.rewards):
        try:
            terms.append(reward_term(section))
        except InputError as error:
            yield InputError(error.place.replace("rewards.", f"rewards.{index}.", 1), error.value, error.hint)
    try:
        settings = advantage_settings(config.advantages)
    except InputError:
        return  # told with the advantages
    if len(terms) == len(config.rewards):
        try:
            refuse_terms(terms, settings)
        except InputError as error:
            yield error


def _reward(config: RunConfig, section: RewardSection, place: str, parts: Sequence[str]) -> Iterator[InputError]:
    modality = policy_family(config.policy.kind).modality
    try:
        reward = build_reward(section.reward, section.settings)
    except InputError as error:
        yield InputError(f"{place}: {error.place}", error.value, error.hint)
        return
    if modality not in reward.media:
        scored = " or ".join(f"{each}s" for each in reward.media)
        hint = f"It scores {scored}, and policy.kind {config.policy.kind} makes {modality}s."
        yield InputError(f"{place}.reward", section.reward, hint)
        return
    if reward.needs_target:
        yield from _targets(config, section, place, parts)
    if isinstance(config.rollout, ImageRolloutSection):
        yield from size_problems(reward, section, place, config.rollout.width, config.rollout.height)


def size_problems(reward: Reward, section: RewardSection, place: str, width: int, height: int) -> Iterator[InputError]:
    """Images that are too small or too long for the reward."""
    if min(width, height) < reward.min_side:
        hint = f"It needs images of at least {reward.min_side} pixels a side."
        yield InputError(f"{place}.reward", f"{section.reward} of {width}x{height} pixels", hint)
    if max(width, height) > reward.max_aspect * min(width, height):
        hint = f"It takes images whose long side is at most {reward.max_aspect:g} times the short one."
        yield InputError(f"{place}.reward", f"{section.reward} of {width}x{height} pixels", hint)


def _targets(config: RunConfig, section: RewardSection, place: str, parts: Sequence[str]) -> Iterator[InputError]:
    for part, data in ((part, getattr(config, part)) for part in parts):
        for dataset in data.sets:
            if section.scores(dataset.name) and not (dataset.targets or dataset.target_column):
                where = f"{part}.datasets.{data.sets.index(dataset)}" if data.datasets else part
                hint = f"It compares with a target image: set {where}.targets or {where}.target_column."
                yield InputError(f"{place}.reward", section.reward, hint)


def _guardrails(config: RunConfig) -> Iterator[InputError]:
    watch = config.watch
    yield from _labels("watch.guardrails", watch.guardrails)
    for index, section in enumerate(watch.guardrails):
        place = f"watch.guardrails.{index}"
        # They never see a sample that is trained on.
        yield from _reward(config, section, place, ("evaluate",))
        plain = RewardSection(reward=section.reward)
        for field in _OF_THE_MIX:
            if getattr(section, field) != getattr(plain, field):
                hint = "A guardrail is looked at and counts for nothing; leave it out."
                yield InputError(f"{place}.{field}", getattr(section, field), hint)
    if watch.guardrails and not config.evaluate.sets:
        hint = "They are scored on held-out samples; set evaluate.prompts, or leave them out."
        yield InputError("watch.guardrails", [section.label for section in watch.guardrails], hint)
    if watch.stop and not watch.guardrails:
        yield InputError("watch.stop", True, "Nothing is watched; name watch.guardrails, or leave it out.")
    if watch.stop and watch.guardrails and not config.evaluate.every:
        hint = "Only the first and the last policy are evaluated; set evaluate.every, or leave it out."
        yield InputError("watch.stop", True, hint)
