"""What is wrong with the prompt files of a configuration and with the rewards that are meant for some of them."""

from collections import Counter
from collections.abc import Iterator

from configs.reward_sections import RewardSection
from configs.schema import DatasetSection, PromptsSection, RunConfig
from grpo_core.errors import InputError

_OF_ONE_FILE = ("prompts", "prompt_column", "limit", "targets", "target_column")


def dataset_contradictions(config: RunConfig) -> Iterator[InputError]:
    """Every impossible combination of prompt files, and of rewards with them; nothing is read."""
    if not config.data.sets:
        yield InputError("data.prompts", None, "Give a prompt file, or several as data.datasets.")
    for place, section in _sections(config):
        yield from _one_way(place, section)
        yield from _names(place, section)
    yield from _routes(config)
    yield from _unscored(config)


def _sections(config: RunConfig) -> tuple[tuple[str, PromptsSection], ...]:
    return (("data", config.data), ("evaluate", config.evaluate))


def _one_way(place: str, section: PromptsSection) -> Iterator[InputError]:
    if not section.datasets:
        return
    for field in _OF_ONE_FILE:
        value = getattr(section, field)
        if value is not None:
            hint = f"It stands beside {place}.datasets; write it into one of them, and leave it out here."
            yield InputError(f"{place}.{field}", value, hint)


def _names(place: str, section: PromptsSection) -> Iterator[InputError]:
    for name, times in Counter(each.name for each in section.datasets).items():
        if times > 1:
            yield InputError(f"{place}.datasets", name, f"{times} datasets have this name; give each one of its own.")


def _routes(config: RunConfig) -> Iterator[InputError]:
    known = sorted({each.name for _, section in _sections(config) for each in section.sets})
    for index, section in enumerate(config.rewards):
        place = f"rewards.{index}.datasets"
        if section.datasets == ():
            yield InputError(place, [], "The reward would score nothing; name a dataset, or leave it out for all.")
        for name in section.datasets or ():
            if name not in known:
                yield InputError(place, name, f"There is no such dataset; there is {', '.join(known) or 'none'}.")


def _unscored(config: RunConfig) -> Iterator[InputError]:
    if not any(reward.weight for reward in config.rewards):
        return
    for place, section in _sections(config):
        for each in section.sets:
            if any(reward.weight and _meant_for(reward, each) for reward in config.rewards):
                continue
            hint = (
                "No reward with a weight is meant for this dataset, so nothing would be learned from it; add its name "
                "to the datasets of a reward."
            )
            yield InputError(f"{place}.datasets" if section.datasets else f"{place}.prompts", each.name, hint)


def _meant_for(section: RewardSection, dataset: DatasetSection) -> bool:
    return section.datasets is None or dataset.name in section.datasets
