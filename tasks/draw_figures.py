"""Figures of one stage over the draws of an iteration."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tasks.storage.reference import ArtifactRef

_JOINED: Mapping[str, Callable[[list[float]], float]] = MappingProxyType(
    {"num_tokens": sum, "null": sum, "min_length": min, "max_length": max}
)


def over_draws(stages: Sequence[ArtifactRef]) -> dict[str, float]:
    """Counts are summed, extremes taken; of any other figure the mean, weighted by the samples of each draw."""
    if len(stages) == 1:
        return dict(stages[0].metrics)
    metrics = {}
    for name in dict.fromkeys(name for stage in stages for name in stage.metrics):
        known = [stage for stage in stages if name in stage.metrics]
        join = _JOINED.get(name.rsplit("/", 1)[-1])
        if join is not None:
            metrics[name] = join([stage.metrics[name] for stage in known])
        else:
            rows = sum(stage.rows for stage in known)
            metrics[name] = sum(stage.metrics[name] * stage.rows for stage in known) / rows
    return metrics
