"""Analyse rewards from stored scores: spread, saturation, noise, cost, agreement."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from tasks.reports.statistics import (
    GROUP,
    SAMPLE,
    Histogram,
    Quantiles,
    RankAgreement,
    Spread,
    finite,
    histogram_of,
    number_or_none,
    quantiles_of,
    rank_agreement,
    require_columns,
    require_unique,
    settled,
    spread_of,
    with_groups,
)

COLUMNS = (*GROUP, "sample_id", "dataset", "label", "value", "raw", "seconds", "failure")
NUMBERS = ("value", "raw", "seconds")

EDGE = 1e-6
"""A value within this distance of a bound, or of the highest one, is at it."""

MAX_REASONS = 5


@dataclass(frozen=True)
class Noise:
    """Differences between two scorings of the same samples, to the last bit.

    Attributes:
        pairs: samples with a value in both scorings.
        mean_difference: mean absolute difference.
        max_difference: largest absolute difference.
        share_differing: share of the pairs that differ at all.
        one_sided: samples with a value in only one scoring.
    """

    pairs: int
    mean_difference: float | None
    max_difference: float | None
    share_differing: float | None
    one_sided: int


@dataclass(frozen=True)
class Saturation:
    """Shares of values at a bound.

    Attributes:
        at_floor: at 0.
        at_ceiling: at 1.
        at_highest: at the highest value, whatever it is; 1 / values where no two share it.
    """

    at_floor: float
    at_ceiling: float
    at_highest: float


@dataclass(frozen=True)
class Cost:
    """Seconds per sample, as they were stored.

    Attributes:
        total: over all samples.
        mean: over samples.
        median: over samples.
        p95: 95th percentile.
    """

    total: float
    mean: float
    median: float
    p95: float


@dataclass(frozen=True)
class IterationMean:
    """One reward over the samples of one iteration of all runs.

    Attributes:
        iteration: number, from 1.
        mean: None where no sample has a value.
        values: samples that have one.
    """

    iteration: int
    mean: float | None
    values: int


@dataclass(frozen=True)
class RewardMetrics:
    """Metrics of one reward.

    Attributes:
        label: label of the reward.
        spread: spread of its values in groups. It does not apply to samples without a value, or failed for them.
        not_applicable: samples that it does not apply to.
        failures: samples that it failed for.
        failure_reasons: failures by reason, the most frequent first.
        values: quantiles of the values; None without any.
        raw: the same before scaling, in the reward's own unit.
        saturation: None without values.
        signal_ratio: spread within groups over the standard deviation of all values: near 0 it
            distinguishes prompts, but not their samples. None without either, or where all values are equal.
        noise: None where nothing was scored twice.
        noise_to_spread: mean difference between two scorings over the spread within groups; None without either, or
            without spread.
        cost: None where no seconds were stored.
        trend: mean by iteration.
        histogram: histogram of the values; None without any.
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
class Agreement:
    """Two rewards over the samples that have both.

    Attributes:
        first: label of one reward.
        second: label of the other.
        ranks: Spearman's rank correlation, over all samples and within groups.
        centred: samples that lie off their group's mean by both rewards.
        same_sign: share of these that lie on the same side of it; None without any.
    """

    first: str
    second: str
    ranks: RankAgreement
    centred: int
    same_sign: float | None


@dataclass(frozen=True)
class RewardAnalysis:
    """Rewards over the same samples.

    Attributes:
        runs: names of the samples' runs, sorted.
        samples: number of samples.
        groups: number of their groups.
        rewards: each reward alone, in the order of the scores.
        agreements: every pair of rewards once.
    """

    runs: tuple[str, ...]
    samples: int
    groups: int
    rewards: tuple[RewardMetrics, ...]
    agreements: tuple[Agreement, ...]

    def agreement(self, first: str, second: str) -> Agreement:
        """Find the agreement of two different rewards, in either order."""
        return next(pair for pair in self.agreements if {pair.first, pair.second} == {first, second})

    def summary(self) -> dict[str, Any]:
        """Convert every number to what JSON has; histograms are left out."""
        values = dataclasses.asdict(self)
        for reward in values["rewards"]:
            del reward["histogram"]
            reward["trend"] = list(reward["trend"])
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def analyse(scores: pl.DataFrame, repeats: pl.DataFrame | None = None) -> RewardAnalysis:
    """Analyse each reward, and each pair of them.

    Args:
        scores: one row per sample and reward, with the columns run, iteration, group_id, sample_id, dataset, label,
            value, raw, seconds and failure. Values that are null or not finite count as missing; `failure` is null
            where nothing failed.
        repeats: some of the same samples scored a second time.

    Raises:
        ValueError: a column is missing, there is no score, or a sample has two scores by one reward.
    """
    frame = _prepare(scores, "scores")
    if frame.is_empty():
        raise ValueError("scores are empty: there is nothing to analyse")
    again = None if repeats is None else _prepare(repeats, "repeats")
    labels = list(frame["label"].unique(maintain_order=True))
    return RewardAnalysis(
        runs=tuple(sorted(frame["run"].unique())),
        samples=frame.select(SAMPLE).n_unique(),
        groups=frame["group"].n_unique(),
        rewards=tuple(_metrics(label, frame.filter(pl.col("label") == label), again) for label in labels),
        agreements=agreements_of(*_wide(frame, labels)),
    )


def _prepare(scores: pl.DataFrame, what: str) -> pl.DataFrame:
    require_columns(scores, COLUMNS, what)
    require_unique(scores, (*SAMPLE, "label"), what)
    frame = finite(scores.select(*COLUMNS, exact="value").with_columns(pl.col("failure").cast(pl.String)), ["exact"])
    parts = [settled(part, NUMBERS) for part in frame.partition_by("label", maintain_order=True)]
    return with_groups(pl.concat(parts) if parts else settled(frame, NUMBERS))


def _wide(frame: pl.DataFrame, labels: list[str]) -> tuple[pl.DataFrame, list[tuple[str, str]]]:
    """Pivot to a row per sample and a column per reward; columns have numbers, because a label may be any text."""
    columns = [(label, f"reward_{index}") for index, label in enumerate(labels)]
    numbered = frame.with_columns(pl.col("label").replace_strict(dict(columns), return_dtype=pl.String))
    return numbered.pivot(on="label", index=[*SAMPLE, "group"], values="value"), columns


def _metrics(label: str, frame: pl.DataFrame, again: pl.DataFrame | None) -> RewardMetrics:
    spread, noise = spread_of(frame, "value"), None
    if again is not None:
        second = again.filter(pl.col("label") == label).select(*SAMPLE, again="exact")
        noise = _noise(frame.select(*SAMPLE, value="exact").join(second, on=SAMPLE, how="inner"))
    failed = frame.drop_nulls("failure")
    reasons = failed.group_by("failure").len().sort(["len", "failure"], descending=[True, False]).head(MAX_REASONS)
    trend = frame.group_by("iteration").agg(pl.col("value").mean(), pl.col("value").count().alias("values"))
    return RewardMetrics(
        label=label,
        spread=spread,
        not_applicable=spread.samples - spread.values - failed["value"].null_count(),
        failures=failed.height,
        failure_reasons=dict(reasons.iter_rows()),
        values=quantiles_of(frame["value"]),
        raw=quantiles_of(frame["raw"]),
        saturation=_saturation(frame["value"].drop_nulls()),
        signal_ratio=_ratio(spread.within_groups, spread.std),
        noise=noise,
        noise_to_spread=_ratio(noise.mean_difference if noise else None, spread.within_groups),
        cost=_cost(frame["seconds"].drop_nulls()),
        trend=tuple(IterationMean(*row) for row in trend.sort("iteration").iter_rows()),
        histogram=histogram_of(frame["value"]),
    )


def _noise(pairs: pl.DataFrame) -> Noise | None:
    """Compare the columns `value` and `again`; None where no sample has either."""
    both = pairs.drop_nulls(["value", "again"])
    difference = (both["value"] - both["again"]).abs()
    one_sided = pairs.filter(pl.col("value").is_null() != pl.col("again").is_null()).height
    if not both.height and not one_sided:
        return None
    return Noise(
        pairs=both.height,
        mean_difference=number_or_none(difference.mean()),
        max_difference=number_or_none(difference.max()),
        share_differing=number_or_none((difference > 0).mean()),
        one_sided=one_sided,
    )


def _saturation(values: pl.Series) -> Saturation | None:
    highest = number_or_none(values.max())
    if highest is None:
        return None
    shares = (float(((values - bound).abs() <= EDGE).sum()) / len(values) for bound in (0.0, 1.0, highest))
    return Saturation(*shares)


def _cost(seconds: pl.Series) -> Cost | None:
    found = quantiles_of(seconds)
    mean = number_or_none(seconds.mean())
    if found is None or mean is None:
        return None
    return Cost(total=float(seconds.sum()), mean=mean, median=found.median, p95=found.p95)


def _ratio(part: float | None, total: float | None) -> float | None:
    return None if part is None or not total else part / total


def agreements_of(wide: pl.DataFrame, columns: Sequence[tuple[str, str]]) -> tuple[Agreement, ...]:
    """Compare every pair of rewards once, in the order given.

    Args:
        wide: one row per sample, settled columns, and the groups numbered by `group`.
        columns: label and column of each reward.
    """
    return tuple(_agreement(wide, first, second) for first, second in itertools.combinations(columns, 2))


def _agreement(wide: pl.DataFrame, first: tuple[str, str], second: tuple[str, str]) -> Agreement:
    both = wide.select("group", first=first[1], second=second[1]).drop_nulls(["first", "second"])
    sides = (pl.col("first"), pl.col("second"))
    centred = both.with_columns((side - side.mean().over("group")).name.prefix("off_") for side in sides)
    if centred.height:
        centred = centred.filter(*(side.min().over("group") < side.max().over("group") for side in sides))
    centred = settled(centred, ["off_first", "off_second"])
    off = centred.filter((pl.col("off_first") != 0) & (pl.col("off_second") != 0))
    same = off.select((pl.col("off_first").sign() == pl.col("off_second").sign()).mean()).item()
    return Agreement(
        first=first[0],
        second=second[0],
        ranks=rank_agreement(wide, first[1], second[1]),
        centred=off.height,
        same_sign=number_or_none(same),
    )
