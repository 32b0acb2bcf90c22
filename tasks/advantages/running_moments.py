"""Running moments of rewards, kept from iteration to iteration as figures of their advantages."""

from collections.abc import Sequence

from configs.reward_sections import RewardSection
from grpo_core.rewards.mix.running import RunningMoments
from tasks.metrics.names import RUNNING
from tasks.storage.artifacts.reference import ArtifactRef


def running_figures(earlier: ArtifactRef | None, mix: Sequence[RewardSection]) -> dict[str, float]:
    """The figures of the rewards that are normalised so; empty where none is, and before the first iteration."""
    if earlier is None:
        return {}
    names = [name for section in mix if section.normalize == "running" for name in _names(section)]
    return {name: earlier.metrics[name] for name in names if name in earlier.metrics}


def running_moments(earlier: ArtifactRef | None, mix: Sequence[RewardSection]) -> RunningMoments | None:
    """The moments so far, one entry a reward; None before the first iteration, and where no reward asks for them."""
    figures = running_figures(earlier, mix)
    if not figures:
        return None
    entries = [[figures.get(name, 0.0) for name in _names(section)] for section in mix]
    counts, means, squares = zip(*entries, strict=True)
    return RunningMoments(tuple(int(count) for count in counts), means, squares)


def told_moments(moments: RunningMoments, mix: Sequence[RewardSection]) -> dict[str, float]:
    """As figures that a table's manifest can keep."""
    figures: dict[str, float] = {}
    for section, *entry in zip(mix, moments.counts, moments.means, moments.squares, strict=True):
        if section.normalize == "running":
            figures |= {name: float(value) for name, value in zip(_names(section), entry, strict=True)}
    return figures


def _names(section: RewardSection) -> tuple[str, str, str]:
    start = f"{RUNNING}{section.label}"
    return f"{start}/count", f"{start}/mean", f"{start}/squares"
