"""Analyse rewards from stored scores: spread, saturation, noise, cost, agreement."""

import itertools
from collections.abc import Mapping

import polars as pl

from tasks.reports.statistics import (
    GROUP,
    SAMPLE,
    Statistics,
    finite,
    number_or_none,
    quantiles_of,
    rank_agreement,
    rounded,
    spread_of,
    with_groups,
)

NUMBERS = ("value", "raw", "seconds")
COLUMNS = (*GROUP, "sample_id", "dataset", "label", *NUMBERS, "failure")

EDGE = 1e-6  # a value within this distance of a bound, or of the highest one, is at it

MAX_REASONS = 5


def analyse(scores: pl.DataFrame, repeats: pl.DataFrame | None = None) -> Statistics:
    """Analyse each reward, and each pair of them; ValueError without a score.

    `scores` has a row per sample and reward, with the columns run, iteration, group_id, sample_id, dataset, label,
    value, raw, seconds and failure, null where nothing failed; `repeats` has some of the same samples scored a second
    time. Values that are null or not finite count as missing.
    """
    frame = _prepare(scores)
    if frame.is_empty():
        raise ValueError("scores are empty: there is nothing to analyse")
    again = None if repeats is None else _prepare(repeats)
    labels = list(frame["label"].unique(maintain_order=True))
    # Columns have numbers, because a label may be any text.
    columns = {label: f"reward_{index}" for index, label in enumerate(labels)}
    numbered = frame.with_columns(pl.col("label").replace_strict(columns, return_dtype=pl.String))
    wide = numbered.pivot(on="label", index=[*SAMPLE, "group"], values="value")
    return {
        "runs": sorted(frame["run"].unique()),
        "samples": frame.select(SAMPLE).n_unique(),
        "groups": frame["group"].n_unique(),
        "rewards": [_analyse_reward(label, frame.filter(pl.col("label") == label), again) for label in labels],
        "agreements": [_agreement(wide, columns, first, second) for first, second in itertools.combinations(labels, 2)],
    }


def _prepare(scores: pl.DataFrame) -> pl.DataFrame:
    """Round the numbers of each reward, and keep each value to the last bit in the column `exact`."""
    assert scores.select(*SAMPLE, "label").is_unique().all(), "a sample has one score by each reward"
    frame = finite(scores.select(*COLUMNS, exact="value").with_columns(pl.col("failure").cast(pl.String)), ["exact"])
    parts = [rounded(part, NUMBERS) for part in frame.partition_by("label", maintain_order=True)]
    return with_groups(pl.concat(parts) if parts else rounded(frame, NUMBERS))


def _analyse_reward(label: str, frame: pl.DataFrame, again: pl.DataFrame | None) -> Statistics:
    spread, noise = spread_of(frame, "value"), None
    if again is not None:
        second = again.filter(pl.col("label") == label).select(*SAMPLE, again="exact")
        noise = _noise(frame.select(*SAMPLE, value="exact").join(second, on=SAMPLE, how="inner"))
    failed = frame.drop_nulls("failure")
    reasons = failed.group_by("failure").len().sort(["len", "failure"], descending=[True, False]).head(MAX_REASONS)
    trend = frame.group_by("iteration").agg(mean=pl.col("value").mean(), values=pl.col("value").count())
    return {
        "label": label,
        "spread": spread,
        # Numbers of samples without a value: it does not apply to them, or failed for them.
        "not_applicable": spread["samples"] - spread["values"] - failed["value"].null_count(),
        "failures": failed.height,
        "failure_reasons": dict(reasons.iter_rows()),
        "values": quantiles_of(frame["value"]),
        "raw": quantiles_of(frame["raw"]),
        "saturation": _saturation(frame["value"].drop_nulls()),
        # Near 0 it distinguishes prompts, but not their samples.
        "signal_ratio": _ratio(spread["within_groups"], spread["std"]),
        "noise": noise,  # None where nothing was scored twice
        "noise_to_spread": _ratio(noise["mean_difference"] if noise else None, spread["within_groups"]),
        "cost": _cost(frame["seconds"].drop_nulls()),
        "trend": trend.sort("iteration").to_dicts(),
    }


def _noise(pairs: pl.DataFrame) -> Statistics | None:
    """Compare the columns `value` and `again`, to the last bit; None where no sample has either."""
    both = pairs.drop_nulls(["value", "again"])
    difference = (both["value"] - both["again"]).abs()
    one_sided = pairs.filter(pl.col("value").is_null() != pl.col("again").is_null()).height
    if not both.height and not one_sided:
        return None
    return {
        "pairs": both.height,
        "mean_difference": number_or_none(difference.mean()),
        "max_difference": number_or_none(difference.max()),
        "share_differing": number_or_none((difference > 0).mean()),
        "one_sided": one_sided,
    }


def _saturation(values: pl.Series) -> Statistics | None:
    highest = number_or_none(values.max())
    if highest is None:
        return None
    bounds = {"at_floor": 0.0, "at_ceiling": 1.0, "at_highest": highest}
    return {name: float(((values - bound).abs() <= EDGE).sum()) / len(values) for name, bound in bounds.items()}


def _cost(seconds: pl.Series) -> Statistics | None:
    found = quantiles_of(seconds)
    if found is None:
        return None
    return {
        "total": float(seconds.sum()),
        "mean": number_or_none(seconds.mean()),
        "median": found["median"],
        "p95": found["p95"],
    }


def _ratio(part: float | None, total: float | None) -> float | None:
    return None if part is None or not total else part / total


def _agreement(wide: pl.DataFrame, columns: Mapping[str, str], first: str, second: str) -> Statistics:
    """Compare two rewards, whose rounded columns of `wide` are named by their labels, over the samples with both."""
    both = wide.select("group", first=columns[first], second=columns[second]).drop_nulls(["first", "second"])
    sides = (pl.col("first"), pl.col("second"))
    centred = both.with_columns((side - side.mean().over("group")).name.prefix("off_") for side in sides)
    if centred.height:
        centred = centred.filter(*(side.min().over("group") < side.max().over("group") for side in sides))
    centred = rounded(centred, ["off_first", "off_second"])
    off = centred.filter((pl.col("off_first") != 0) & (pl.col("off_second") != 0))
    same = off.select((pl.col("off_first").sign() == pl.col("off_second").sign()).mean()).item()
    return {
        "first": first,
        "second": second,
        "ranks": rank_agreement(wide, columns[first], columns[second]),
        "centred": off.height,  # samples that lie off their group's mean by both rewards
        "same_sign": number_or_none(same),  # share of these that lie on the same side of it
    }
