"""What changed when stored rollouts were scored again: rewards, ranks and advantages, before and after."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from tasks.reports.statistics import (
    GROUP,
    SAMPLE,
    RankAgreement,
    Spread,
    number_or_none,
    rank_agreement,
    require_columns,
    require_unique,
    settled,
    spread_of,
    with_groups,
)
from tasks.reports.text import correlation, number, percent

BEFORE, AFTER = "before:", "after:"
"""Prefixes of the columns of single rewards, followed by their labels."""

COLUMNS = (*GROUP, "sample_id", "prompt", "dataset")
REWARDS = ("reward_before", "reward_after")
ADVANTAGES = ("advantage_before", "advantage_after")
MAX_MOVED = 20

HEADINGS = (
    "reward",
    "mean",
    "spread in groups",
    "groups without spread",
    "without a value",
    "order kept, all / in groups",
    "order by the previous reward, all / in groups",
)
"""Headings of the columns of :func:`reward_rows`."""


@dataclass(frozen=True)
class RewardChange:
    """One reward, or the combined one, on both sides.

    Attributes:
        label: label of the reward.
        before: None where it was not part of the previous scoring.
        after: None where it is not part of the later scoring.
        own: ranks by its previous values against its later values; None where a side is missing.
        with_previous: ranks by it (later values, or previous ones where there are no later) against the previous
            combined reward.
    """

    label: str
    before: Spread | None
    after: Spread | None
    own: RankAgreement | None
    with_previous: RankAgreement


@dataclass(frozen=True)
class AdvantageChange:
    """The samples' advantages before and after.

    Attributes:
        compared: samples with an advantage on both sides.
        gained: samples with an advantage on the later side only.
        lost: samples with one on the previous side only.
        non_zero_before: share of the compared that had one other than zero; None without any.
        non_zero_after: likewise.
        both_non_zero: compared samples with neither side zero.
        turned: share of these whose sign is the opposite; None without any.
        zero_before: compared samples whose advantage was zero.
        from_zero: share of these whose advantage is not zero afterwards; None without any.
        to_zero: share of those that were not zero whose advantage became zero; None without any.
    """

    compared: int
    gained: int
    lost: int
    non_zero_before: float | None
    non_zero_after: float | None
    both_non_zero: int
    turned: float | None
    zero_before: int
    from_zero: float | None
    to_zero: float | None


@dataclass(frozen=True)
class RescoringComparison:
    """Two scorings of the same samples.

    Attributes:
        runs: names of the samples' runs, sorted.
        samples: number of all samples, with and without rewards.
        groups: number of their groups.
        combined: the combined reward.
        rewards: each reward alone: those of both sides first, then the added, then the removed.
        advantages: what changed in the samples' advantages.
    """

    runs: tuple[str, ...]
    samples: int
    groups: int
    combined: RewardChange
    rewards: tuple[RewardChange, ...]
    advantages: AdvantageChange

    def summary(self) -> dict[str, Any]:
        """Convert every number to what JSON has."""
        values = dataclasses.asdict(self)
        return {**values, "runs": list(self.runs), "rewards": list(values["rewards"])}


def compare(samples: pl.DataFrame) -> RescoringComparison:
    """Compare two scorings of the same samples.

    Args:
        samples: one row per sample, with the columns run, iteration, group_id, sample_id, prompt, dataset,
            reward_before, reward_after, advantage_before, advantage_after, and `before:LABEL` and `after:LABEL` of each
            reward. Values that are null or not finite count as missing.

    Raises:
        ValueError: a column is missing, a sample occurs twice, or no sample has a reward on both sides.
    """
    frame = prepare(samples)
    before, after = labels(frame, BEFORE), labels(frame, AFTER)
    ordered = [label for label in after if label in before]
    ordered += [label for label in after if label not in before]
    ordered += [label for label in before if label not in after]
    sides = {
        label: (BEFORE + label if label in before else None, AFTER + label if label in after else None)
        for label in ordered
    }
    return RescoringComparison(
        runs=tuple(sorted(frame["run"].unique())),
        samples=frame.height,
        groups=frame["group"].n_unique(),
        combined=_change(frame, "reward", *REWARDS),
        rewards=tuple(_change(frame, label, *columns) for label, columns in sides.items()),
        advantages=_advantages(frame),
    )


def prepare(samples: pl.DataFrame) -> pl.DataFrame:
    """Check the samples, settle their numbers and number their groups.

    Raises:
        ValueError: as :func:`compare` does.
    """
    require_columns(samples, (*COLUMNS, *REWARDS, *ADVANTAGES), "samples")
    require_unique(samples, SAMPLE, "samples")
    rewards = [column for column in samples.columns if column.startswith((BEFORE, AFTER))]
    frame = with_groups(settled(samples, [*REWARDS, *ADVANTAGES, *rewards]))
    if frame.drop_nulls(REWARDS).is_empty():
        counts = ", ".join(f"{frame[side].count()} have a {side.replace('_', ' ')}" for side in REWARDS)
        raise ValueError(f"none of {frame.height} samples has a reward before and after ({counts}): nothing compares")
    return frame


def labels(frame: pl.DataFrame, side: str) -> list[str]:
    """List the labels of the single rewards of a side, in the order of their columns."""
    return [column.removeprefix(side) for column in frame.columns if column.startswith(side)]


def _change(frame: pl.DataFrame, label: str, before: str | None, after: str | None) -> RewardChange:
    latest = after or before
    assert latest is not None, "a reward is on one side at least"
    return RewardChange(
        label=label,
        before=None if before is None else spread_of(frame, before),
        after=None if after is None else spread_of(frame, after),
        own=None if before is None or after is None else rank_agreement(frame, before, after),
        with_previous=rank_agreement(frame, REWARDS[0], latest),
    )


def _advantages(frame: pl.DataFrame) -> AdvantageChange:
    was, now = (pl.col(column) for column in ADVANTAGES)
    both = frame.drop_nulls(ADVANTAGES)
    non_zero = both.filter((was != 0) & (now != 0))
    zero = both.filter(was == 0)
    return AdvantageChange(
        compared=both.height,
        gained=frame.filter(was.is_null() & now.is_not_null()).height,
        lost=frame.filter(was.is_not_null() & now.is_null()).height,
        non_zero_before=_share(both, was != 0),
        non_zero_after=_share(both, now != 0),
        both_non_zero=non_zero.height,
        turned=_share(non_zero, was.sign() != now.sign()),
        zero_before=zero.height,
        from_zero=_share(zero, now != 0),
        to_zero=_share(both.filter(was != 0), now == 0),
    )


def _share(frame: pl.DataFrame, condition: pl.Expr) -> float | None:
    return number_or_none(frame.select(condition.mean()).item())


def moved_most(samples: pl.DataFrame, count: int = MAX_MOVED) -> pl.DataFrame:
    """Find the samples whose rank moved furthest; fewer where fewer moved.

    Ranks count from 1, the highest reward, among the siblings that have a reward on both sides; equal rewards share
    the mean of their ranks. Samples are ordered by the places that they moved within their group, then by the points
    that they moved among all samples, then by run and sample id.

    Args:
        samples: as for :func:`compare`.
        count: maximum number of rows.

    Returns:
        The rows of `samples` with siblings, rank_before, rank_after, places (positive if it rose), percentile_before,
        percentile_after (100 is the highest reward of all samples, 0 the lowest, 50 with a single sample) and points.

    Raises:
        ValueError: as :func:`compare` does.
    """
    rated = prepare(samples).drop_nulls(REWARDS)
    before, after = (pl.col(side) for side in REWARDS)
    ranked = rated.with_columns(
        siblings=pl.len().over("group"),
        rank_before=before.rank(descending=True).over("group"),
        rank_after=after.rank(descending=True).over("group"),
        percentile_before=_percentile(before, rated.height),
        percentile_after=_percentile(after, rated.height),
    ).with_columns(
        places=pl.col("rank_before") - pl.col("rank_after"),
        points=pl.col("percentile_after") - pl.col("percentile_before"),
    )
    moved = ranked.filter((pl.col("places") != 0) | (pl.col("points") != 0))
    furthest = [pl.col("places").abs(), pl.col("points").abs(), pl.col("run"), pl.col("sample_id")]
    return moved.sort(furthest, descending=[True, True, False, False]).head(count).drop("group")


def _percentile(reward: pl.Expr, count: int) -> pl.Expr:
    return (reward.rank() - 1) / (count - 1) * 100 if count > 1 else pl.lit(50.0)


def reward_rows(comparison: RescoringComparison) -> Iterator[tuple[str, ...]]:
    """List the combined reward, then each one alone: one cell per heading, both sides with an arrow between them."""
    yield _row(comparison.combined, "combined")
    for change in comparison.rewards:
        note = "" if change.before and change.after else " (added)" if change.after else " (removed)"
        yield _row(change, change.label + note)


def advantage_rows(advantages: AdvantageChange) -> Iterator[tuple[str, str]]:
    """List what changed in advantages, and how much of it there is."""
    both, zero = advantages.both_non_zero, advantages.zero_before
    yield "advantages on both sides", f"{advantages.compared:,}"
    yield "sign turned", f"{percent(advantages.turned)} of {both:,} that are not zero on either side"
    yield "not zero", f"{percent(advantages.non_zero_before)} → {percent(advantages.non_zero_after)}"
    yield "zero only before", f"{percent(advantages.from_zero)} of {zero:,} that were zero"
    yield "zero only after", f"{percent(advantages.to_zero)} of {advantages.compared - zero:,} that were not"
    yield "on one side only", f"{advantages.lost:,} before, {advantages.gained:,} after"


def _row(change: RewardChange, name: str) -> tuple[str, ...]:
    sides, own, previous = (change.before, change.after), change.own, change.with_previous
    return (
        name,
        " → ".join(number(side.mean) for side in sides if side),
        " → ".join(number(side.within_groups) for side in sides if side),
        " → ".join(percent(side.groups_without_spread) for side in sides if side),
        " → ".join(percent(side.null_share) for side in sides if side),
        "" if own is None else f"{correlation(own.overall, 3)} / {correlation(own.within_groups, 3)}",
        f"{correlation(previous.overall, 3)} / {correlation(previous.within_groups, 3)}",
    )
