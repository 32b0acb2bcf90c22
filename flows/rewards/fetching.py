"""`grpo rewards fetch`: which published weights the named rewards read."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from configs.loader import read_config, read_rewards_file
from configs.scoring import RewardSection
from configs.yaml_files import read_mapping
from grpo_core.errors import InputError, joined
from grpo_core.rewards.model_reward import ModelReward
from grpo_core.rewards.registry import REWARDS, build_reward
from grpo_core.rewards.weights.source import Weights
from tasks.reports.report import Report, Table
from tasks.reports.text import size


def plan_fetch(names: Sequence[str], folder: Path) -> dict[Weights, str]:
    """Map the weights of rewards, each once and whether they are here or not, to the first reward that reads them.

    Args:
        names: of rewards with their default settings, or of YAML files with `rewards:`, a configuration's or its own.
        folder: where files go that no setting names.

    Raises:
        InputError: no such reward or file, or weights that cannot be downloaded.
    """
    problems: list[InputError] = []
    found: dict[str | None, tuple[Weights, str]] = {}
    for section in [section for name in names for section in _sections(name)]:
        try:
            reward = build_reward(section.reward, section.settings)
            sources = reward.weight_sources() if isinstance(reward, ModelReward) else {}
            planned = [each.to_fetch(folder) for each in sources.values()]
        except InputError as error:
            problems.append(error)
            continue
        for each in planned:
            # Two rewards may read the same weights.
            found.setdefault(each.source, (each, reward.name))
    if problems:
        raise joined(problems)
    return dict(found.values())


def downloads_report(missing: Mapping[Weights, str]) -> Report:
    """Return what would be downloaded for which reward: size, licence, address, and where it goes."""
    sizes = [weights.size() for weights in missing]
    rows = [
        {
            "reward": reward,
            "size": "unknown" if bytes_ is None else size(bytes_),
            "licence": weights.published.licence or "see its page",
            "from": str(weights.source) if weights.on_hub else weights.published.url,
            "to": "the Hub's cache" if weights.on_hub else str(weights.source),
        }
        for (weights, reward), bytes_ in zip(missing.items(), sizes, strict=True)
    ]
    note = f"{size(sum(filter(None, sizes)))} in total"
    return Report("To download", tables=[Table("", rows, ("licence", "from", "to"), note=note)])


def fetched_report(fetched: Mapping[Weights, str]) -> Report:
    """Return the settings of each reward that name its weights."""
    facts = [(reward, f"{weights.setting}: {weights.source}") for weights, reward in fetched.items()]
    return Report("Here; in the settings of the rewards" if facts else "These rewards need no weights", facts)


def _sections(name: str) -> Iterator[RewardSection]:
    if not name.endswith((".yaml", ".yml")):
        if name not in REWARDS:
            build_reward(name)
        yield RewardSection(reward=name)
        return
    values = read_mapping(name, "REWARD", example="configs/rewards/mix.yaml", keys="rewards")
    if "run" not in values:
        yield from read_rewards_file(name, "REWARD").rewards
        return
    config = read_config(name)
    yield from (*config.rewards, *config.guardrails.rewards)
