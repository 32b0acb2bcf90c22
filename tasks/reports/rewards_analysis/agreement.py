"""How far two rewards want the same."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from tasks.reports.group_ranks import RankAgreement, rank_agreement
from tasks.reports.sample_frames import number_or_none, settled


@dataclass(frozen=True)
class Agreement:
    """Two rewards over the samples that have both.

    Attributes:
        first: label.
        second: label.
        ranks: Spearman's rank correlation, over all samples and within groups.
        centred: samples that lie off their group's mean by both rewards.
        same_sign: share of these that lie on the same side of it; None without any.
    """

    first: str
    second: str
    ranks: RankAgreement
    centred: int
    same_sign: float | None


def agreements_of(wide: pl.DataFrame, columns: Sequence[tuple[str, str]]) -> tuple[Agreement, ...]:
    """Every pair of rewards once, in the order given.

    Args:
        wide: a row a sample, settled columns, and the groups numbered by `group`.
        columns: label and column of each reward.
    """
    pairs = itertools.combinations(columns, 2)
    return tuple(_agreement(wide, first, second) for first, second in pairs)


def _agreement(wide: pl.DataFrame, first: tuple[str, str], second: tuple[str, str]) -> Agreement:
    both = wide.select("group", first=first[1], second=second[1]).drop_nulls(["first", "second"])
    sides = ("first", "second")
    means = both.with_columns((pl.col(side) - pl.col(side).mean().over("group")).alias(f"off_{side}") for side in sides)
    varied = [pl.col(side).min().over("group") < pl.col(side).max().over("group") for side in sides]
    centred = settled(means.filter(*varied) if means.height else means, [f"off_{side}" for side in sides])
    off = centred.filter((pl.col("off_first") != 0) & (pl.col("off_second") != 0))
    same = off.select((pl.col("off_first").sign() == pl.col("off_second").sign()).mean()).item()
    return Agreement(
        first=first[0],
        second=second[0],
        ranks=rank_agreement(wide, first[1], second[1]),
        centred=off.height,
        same_sign=number_or_none(same),
    )
