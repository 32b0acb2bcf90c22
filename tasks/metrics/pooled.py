"""Figures of one stage over the draws of an iteration."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tasks.storage.artifacts.reference import ArtifactRef

_JOINED: Mapping[str, Callable[[list[float]], float]] = MappingProxyType(
    {"num_tokens": sum, "null": sum, "failed": sum, "min_length": min, "max_length": max}
)


def pool_rounds(stages: Sequence[ArtifactRef]) -> dict[str, float]:
    """The figures of all samples of all draws together.

    Counts are summed and extremes taken; means are weighted by the samples that they are of, and standard deviations
    (Bessel-corrected) pooled with their means.
    """
    if len(stages) == 1:
        return dict(stages[0].metrics)
    metrics = {}
    for name in dict.fromkeys(name for stage in stages for name in stage.metrics):
        known = [stage for stage in stages if name in stage.metrics]
        group, _, kind = name.rpartition("/")
        if kind in _JOINED:
            metrics[name] = _JOINED[kind]([stage.metrics[name] for stage in known])
        elif kind == "std":
            metrics[name] = _pooled_std(stages, group)
        else:
            metrics[name] = _mean(known, group, name)
    return metrics


def _counted(stage: ArtifactRef, group: str) -> float:
    """The samples that a figure of the group is of: those that the reward did not leave out."""
    return stage.rows - stage.metrics.get(f"{group}/null", 0.0)


def _mean(stages: Sequence[ArtifactRef], group: str, name: str) -> float:
    counts = [_counted(stage, group) for stage in stages]
    return sum(stage.metrics[name] * count for stage, count in zip(stages, counts, strict=True)) / sum(counts)


def _pooled_std(stages: Sequence[ArtifactRef], group: str) -> float:
    """Of draws of one sample too, which have a mean and no deviation of their own."""
    known = [stage for stage in stages if f"{group}/mean" in stage.metrics]
    mean = _mean(known, group, f"{group}/mean")
    squares = sum(
        (_counted(stage, group) - 1) * stage.metrics.get(f"{group}/std", 0.0) ** 2
        + _counted(stage, group) * (stage.metrics[f"{group}/mean"] - mean) ** 2
        for stage in known
    )
    return math.sqrt(squares / (sum(_counted(stage, group) for stage in known) - 1))
