"""Samples with a previous and a later scoring -> what changed."""

import polars as pl

from tasks.reports.group_ranks import RankAgreement, rank_agreement
from tasks.reports.group_spread import spread_of
from tasks.reports.rescoring.joint import joint_counts
from tasks.reports.rescoring.records import AdvantageChange, RescoringComparison, RewardChange
from tasks.reports.sample_frames import (
    GROUP,
    SAMPLE,
    number_or_none,
    require_columns,
    require_unique,
    settled,
    with_groups,
)

BEFORE, AFTER = "before:", "after:"
"""What the columns of single rewards begin with; their labels follow."""

COLUMNS = (*GROUP, "sample_id", "prompt", "dataset")
REWARDS = ("reward_before", "reward_after")
ADVANTAGES = ("advantage_before", "advantage_after")


def compare(samples: pl.DataFrame) -> RescoringComparison:
    """Compare two scorings of the same samples.

    Args:
        samples: a row a sample, with the columns run, iteration, group_id, sample_id, prompt, dataset, reward_before,
            reward_after, advantage_before, advantage_after, and `before:LABEL` and `after:LABEL` of each reward. What
            is null or not finite counts as not there.

    Raises:
        ValueError: a column is missing, a sample stands twice, or no sample has a reward on both sides.
    """
    frame = read_samples(samples)
    before, after = labels(frame, BEFORE), labels(frame, AFTER)
    ordered = [label for label in after if label in before]
    ordered += [label for label in after if label not in before]
    ordered += [label for label in before if label not in after]
    return RescoringComparison(
        runs=tuple(sorted(frame["run"].unique())),
        samples=frame.height,
        groups=frame["group"].n_unique(),
        combined=_change(frame, "reward", *REWARDS),
        rewards=tuple(
            _change(
                frame,
                label,
                BEFORE + label if label in before else None,
                AFTER + label if label in after else None,
            )
            for label in ordered
        ),
        advantages=_advantages(frame),
        joint=joint_counts(frame, *REWARDS),
    )


def read_samples(samples: pl.DataFrame) -> pl.DataFrame:
    """The samples as they are reckoned with: numbers settled, groups numbered.

    Raises:
        ValueError: as of :func:`compare`.
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
    """Labels of the single rewards of a side, in the order of their columns."""
    return [column.removeprefix(side) for column in frame.columns if column.startswith(side)]


def _change(frame: pl.DataFrame, label: str, before: str | None, after: str | None) -> RewardChange:
    own: RankAgreement | None = None
    if before is not None and after is not None:
        own = rank_agreement(frame, before, after)
    latest = after or before
    assert latest is not None, "a reward stands on one side at least"
    return RewardChange(
        label=label,
        before=None if before is None else spread_of(frame, before),
        after=None if after is None else spread_of(frame, after),
        own=own,
        with_previous=rank_agreement(frame, REWARDS[0], latest),
    )


def _advantages(frame: pl.DataFrame) -> AdvantageChange:
    was, now = (pl.col(column) for column in ADVANTAGES)
    both = frame.drop_nulls(ADVANTAGES)
    lively = both.filter((was != 0) & (now != 0))
    zero, non_zero = both.filter(was == 0), both.filter(was != 0)
    return AdvantageChange(
        compared=both.height,
        gained=frame.filter(was.is_null() & now.is_not_null()).height,
        lost=frame.filter(was.is_not_null() & now.is_null()).height,
        non_zero_before=_share(both, was != 0),
        non_zero_after=_share(both, now != 0),
        both_non_zero=lively.height,
        turned=_share(lively, was.sign() != now.sign()),
        zero_before=zero.height,
        from_zero=_share(zero, now != 0),
        to_zero=_share(non_zero, now == 0),
    )


def _share(frame: pl.DataFrame, condition: pl.Expr) -> float | None:
    return number_or_none(frame.select(condition.mean()).item())
