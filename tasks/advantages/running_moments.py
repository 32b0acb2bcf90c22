"""Running moments of rewards, stored from iteration to iteration as metrics of the advantages."""

from collections.abc import Sequence

from configs.scoring import RewardSection
from grpo_core.rewards.mix.running import RunningMoments
from tasks.metrics.names import RUNNING
from tasks.storage.artifacts.reference import ArtifactRef


def running_metrics(earlier: ArtifactRef | None, mix: Sequence[RewardSection]) -> dict[str, float]:
    """Return the stored moments of the rewards that are normalised over the run; empty before the first iteration."""
    if earlier is None:
        return {}
    names = [name for section in mix if section.normalize == "running" for name in _names(section)]
    return {name: earlier.metrics[name] for name in names if name in earlier.metrics}


def running_moments(earlier: ArtifactRef | None, mix: Sequence[RewardSection]) -> RunningMoments | None:
    """Return the moments so far, one entry per reward; None before the first iteration or if no reward uses them."""
    metrics = running_metrics(earlier, mix)
    if not metrics:
        return None
    entries = [[metrics.get(name, 0.0) for name in _names(section)] for section in mix]
    counts, means, squares = zip(*entries, strict=True)
    return RunningMoments(tuple(int(count) for count in counts), means, squares)


def moments_as_metrics(moments: RunningMoments, mix: Sequence[RewardSection]) -> dict[str, float]:
    """Convert moments to metrics for a table's manifest."""
    metrics: dict[str, float] = {}
    for section, *entry in zip(mix, moments.counts, moments.means, moments.squares, strict=True):
        if section.normalize == "running":
            metrics |= {name: float(value) for name, value in zip(_names(section), entry, strict=True)}
    return metrics


def _names(section: RewardSection) -> tuple[str, str, str]:
    start = f"{RUNNING}{section.label}"
    return f"{start}/count", f"{start}/mean", f"{start}/squares"
