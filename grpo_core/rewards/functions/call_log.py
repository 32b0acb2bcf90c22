"""What a reward function reports beside its scores: TRL's ``log_metric`` and ``log_extra``."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from grpo_core.errors import InputError

_LOGGER = logging.getLogger(__name__)


class CallLog:
    """The reports of one call of a reward function."""

    def __init__(self) -> None:
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        self._columns: defaultdict[str, list[object]] = defaultdict(list)

    def log_metric(self, name: str, value: float) -> None:
        """Note a value of a metric; several values of one call are averaged, as in TRL."""
        self._metrics[str(name)].append(float(value))

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        """Note the values of a column, one per sample; values of several calls follow one another, as in TRL."""
        self._columns[str(column)].extend(values)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The mean of each metric; one with a value that is not finite is left out, with a warning."""
        found = {name: fmean(values) for name, values in self._metrics.items()}
        for name in (name for name, mean in found.items() if not math.isfinite(mean)):
            _LOGGER.warning("a reward function's metric %s is not finite", name)
        return {name: mean for name, mean in found.items() if math.isfinite(mean)}

    def extras(self, samples: int, place: str) -> list[dict[str, object]]:
        """Return the columns of each sample: numbers, None and texts as they are, anything else as its text.

        InputError, with the function's place, for another number of values than samples.
        """
        for column, values in self._columns.items():
            if len(values) != samples:
                hint = f"It got {samples} samples. Give log_extra one value for each, in order."
                raise InputError(f"{place}, log_extra", f"{len(values)} values of {column}", hint)
        return [{column: _plain(values[row]) for column, values in self._columns.items()} for row in range(samples)]


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | bool | int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)
