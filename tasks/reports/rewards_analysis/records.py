"""What each reward is worth: frozen records."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.reports.group_spread import Spread
from tasks.reports.rewards_analysis.agreement import Agreement
from tasks.reports.rewards_analysis.noise import Noise
from tasks.reports.rewards_analysis.quantiles import Histogram, Quantiles


@dataclass(frozen=True)
class Saturation:
    """Values that cannot fall, or rise, any further; shares of all values.

    Attributes:
        at_floor: at 0.
        at_ceiling: at 1.
        at_highest: at the highest value that there is, whatever it is; 1 / values where no two share it.
    """

    at_floor: float
    at_ceiling: float
    at_highest: float


@dataclass(frozen=True)
class Cost:
    """Seconds a sample, as they were stored.

    Attributes:
        total: over all samples.
        mean: of a sample.
        median: of a sample.
        p95: that 95 % of the samples stay within.
    """

    total: float
    mean: float
    median: float
    p95: float


@dataclass(frozen=True)
class IterationMean:
    """One reward over one iteration's samples, of all runs.

    Attributes:
        iteration: its number.
        mean: None where no sample has a value.
        values: samples that have one.
    """

    iteration: int
    mean: float | None
    values: int


@dataclass(frozen=True)
class RewardMetrics:
    """One reward.

    Attributes:
        label: its name.
        spread: its values in groups. A sample without a value is one that it does not apply to, or a failure.
        not_applicable: samples that it does not apply to.
        failures: samples that it failed for.
        failure_reasons: failures by reason, the most frequent first.
        values: where values lie; None without any.
        raw: the same before scaling, in the reward's own unit.
        saturation: None without values.
        signal_ratio: spread within groups over the standard deviation of all values: near 0 it tells prompts apart and
            not their samples. None without either, or where all values are equal.
        noise: None where nothing was scored twice.
        noise_to_spread: mean difference between two scorings over the spread within groups; None without either, or
            without spread.
        cost: None where no seconds were stored.
        trend: by iteration.
        histogram: of the values; None without any.
    """

    label: str
    spread: Spread
    not_applicable: int
    failures: int
    failure_reasons: Mapping[str, int]
    values: Quantiles | None
    raw: Quantiles | None
    saturation: Saturation | None
    signal_ratio: float | None
    noise: Noise | None
    noise_to_spread: float | None
    cost: Cost | None
    trend: tuple[IterationMean, ...]
    histogram: Histogram | None


@dataclass(frozen=True)
class RewardAnalysis:
    """Rewards over the same samples.

    Attributes:
        runs: that the samples come from, sorted.
        samples: of them all.
        groups: of the samples.
        rewards: each by itself, in the order of the scores.
        agreements: every pair of rewards once.
    """

    runs: tuple[str, ...]
    samples: int
    groups: int
    rewards: tuple[RewardMetrics, ...]
    agreements: tuple[Agreement, ...]

    def agreement(self, first: str, second: str) -> Agreement:
        """Of two different rewards, in whichever order."""
        wanted = {first, second}
        return next(pair for pair in self.agreements if {pair.first, pair.second} == wanted)

    def summary(self) -> dict[str, Any]:
        """Every figure as JSON holds it; what only plots need is left out."""
        figures = dataclasses.asdict(self)
        for reward in figures["rewards"]:
            del reward["histogram"]
            reward["trend"] = list(reward["trend"])
        return {name: list(value) if isinstance(value, tuple) else value for name, value in figures.items()}
