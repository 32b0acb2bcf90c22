"""Scores in long form -> what each reward is worth."""

import polars as pl

from tasks.reports.group_spread import spread_of
from tasks.reports.rewards_analysis.agreement import agreements_of
from tasks.reports.rewards_analysis.noise import Noise, noise_of
from tasks.reports.rewards_analysis.quantiles import histogram_of, quantiles_of
from tasks.reports.rewards_analysis.records import Cost, IterationMean, RewardAnalysis, RewardMetrics, Saturation
from tasks.reports.sample_frames import (
    GROUP,
    SAMPLE,
    finite,
    number_or_none,
    require_columns,
    require_unique,
    settled,
    with_groups,
)

COLUMNS = (*GROUP, "sample_id", "dataset", "label", "value", "raw", "seconds", "failure")
NUMBERS = ("value", "raw", "seconds")

EDGE = 1e-6
"""A value this near to a bound, or to the highest one, is at it."""

MAX_REASONS = 5


def analyse(scores: pl.DataFrame, repeats: pl.DataFrame | None = None) -> RewardAnalysis:
    """Look at each reward, and at each pair of them.

    Args:
        scores: a row a sample and reward, with the columns run, iteration, group_id, sample_id, dataset, label, value,
            raw, seconds and failure. What is null or not finite counts as not there; `failure` is null where nothing
            failed.
        repeats: some of the same samples scored a second time.

    Raises:
        ValueError: a column is missing, there is no score, or a sample has two scores by one reward.
    """
    frame = _read(scores, "scores")
    if frame.is_empty():
        raise ValueError("scores are empty: there is nothing to analyse")
    again = None if repeats is None else _read(repeats, "repeats")
    labels = list(frame["label"].unique(maintain_order=True))
    return RewardAnalysis(
        runs=tuple(sorted(frame["run"].unique())),
        samples=frame.select(SAMPLE).n_unique(),
        groups=frame["group"].n_unique(),
        rewards=tuple(_figures(label, frame.filter(pl.col("label") == label), again) for label in labels),
        agreements=agreements_of(*_wide(frame, labels)),
    )


def _read(scores: pl.DataFrame, what: str) -> pl.DataFrame:
    require_columns(scores, COLUMNS, what)
    require_unique(scores, (*SAMPLE, "label"), what)
    frame = scores.select(*COLUMNS, exact="value").with_columns(pl.col("failure").cast(pl.String))
    frame = finite(frame, ["exact"])
    parts = [settled(part, NUMBERS) for part in frame.partition_by("label", maintain_order=True)]
    return with_groups(pl.concat(parts) if parts else settled(frame, NUMBERS))


def _wide(frame: pl.DataFrame, labels: list[str]) -> tuple[pl.DataFrame, list[tuple[str, str]]]:
    """A row a sample, a column a reward; columns have numbers, because a label may be any word."""
    columns = [(label, f"reward_{index}") for index, label in enumerate(labels)]
    numbered = frame.with_columns(pl.col("label").replace_strict(dict(columns), return_dtype=pl.String))
    wide = numbered.pivot(on="label", index=[*SAMPLE, "group"], values="value")
    return wide, columns


def _figures(label: str, frame: pl.DataFrame, again: pl.DataFrame | None) -> RewardMetrics:
    spread, noise = spread_of(frame, "value"), _noise(label, frame, again)
    failed = frame.drop_nulls("failure")
    reasons = failed.group_by("failure").len().sort(["len", "failure"], descending=[True, False]).head(MAX_REASONS)
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
        trend=_trend(frame),
        histogram=histogram_of(frame["value"]),
    )


def _noise(label: str, frame: pl.DataFrame, again: pl.DataFrame | None) -> Noise | None:
    if again is None:
        return None
    second = again.filter(pl.col("label") == label).select(*SAMPLE, again="exact")
    return noise_of(frame.select(*SAMPLE, value="exact").join(second, on=SAMPLE, how="inner"))


def _saturation(values: pl.Series) -> Saturation | None:
    highest = number_or_none(values.max())
    if highest is None:
        return None

    def near(bound: float) -> float:
        return int(((values - bound).abs() <= EDGE).sum()) / len(values)

    return Saturation(at_floor=near(0.0), at_ceiling=near(1.0), at_highest=near(highest))


def _cost(seconds: pl.Series) -> Cost | None:
    mean, median = number_or_none(seconds.mean()), number_or_none(seconds.median())
    p95 = number_or_none(seconds.quantile(0.95, "linear"))
    if mean is None or median is None or p95 is None:
        return None
    return Cost(total=float(seconds.sum()), mean=mean, median=median, p95=p95)


def _trend(frame: pl.DataFrame) -> tuple[IterationMean, ...]:
    rows = frame.group_by("iteration").agg(pl.col("value").mean(), pl.col("value").count().alias("values"))
    return tuple(IterationMean(*row) for row in rows.sort("iteration").iter_rows())


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
