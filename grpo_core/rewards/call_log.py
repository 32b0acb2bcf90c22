"""What a reward function reports beside its scores: TRL's ``log_metric`` and ``log_extra``."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

_LOGGER = logging.getLogger(__name__)


class CallLog:
    """The reports of one call of a reward function."""

    def __init__(self) -> None:
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)

    def log_metric(self, name: str, value: float) -> None:
        """Note a value of a metric; several values of one call are averaged, as in TRL."""
        self._metrics[str(name)].append(float(value))

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        """Write the values of a column to the log, one per sample."""
        _LOGGER.debug("a reward function's column %s: %s", column, values)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The mean of each metric; one with a value that is not finite is left out, with a warning."""
        found = {name: fmean(values) for name, values in self._metrics.items()}
        for name in (name for name, mean in found.items() if not math.isfinite(mean)):
            _LOGGER.warning("a reward function's metric %s is not finite", name)
        return {name: mean for name, mean in found.items() if math.isfinite(mean)}
