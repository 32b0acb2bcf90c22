"""How far two rewards put samples into the same order."""

from dataclasses import dataclass

import polars as pl

from tasks.reports.sample_frames import number_or_none


@dataclass(frozen=True)
class RankAgreement:
    """Spearman's rank correlation of two columns, equal values sharing the mean of their ranks.

    Attributes:
        pairs: samples that have both values.
        overall: over all of them; None where one side is constant, or with fewer than two.
        within_groups: mean over the groups in which it is defined; None where there is none.
        groups: groups in which it is defined.
        groups_undefined: groups with a pair in which one side is constant, or with a single pair.
    """

    pairs: int
    overall: float | None
    within_groups: float | None
    groups: int
    groups_undefined: int


def rank_agreement(frame: pl.DataFrame, first: str, second: str) -> RankAgreement:
    """Correlate the ranks of two settled columns, over all samples and in the groups that `group` numbers.

    Source: Spearman (1904), "The Proof and Measurement of Association between Two Things", with averaged ties.
    """
    pairs = frame.select("group", first=first, second=second).drop_nulls(["first", "second"])
    ranked = pairs.with_columns(pl.col("first", "second").rank().over("group"))
    groups = ranked.group_by("group", maintain_order=True).agg(_rho().alias("rho"))["rho"]
    overall = pairs.select(pl.col("first", "second").rank()).select(_rho()).item() if pairs.height else None
    return RankAgreement(
        pairs=pairs.height,
        overall=number_or_none(overall),
        within_groups=number_or_none(groups.mean()),
        groups=len(groups) - groups.null_count(),
        groups_undefined=groups.null_count(),
    )


def _rho() -> pl.Expr:
    """Correlation of ranks; null where a side is constant, which a correlation is not defined for."""
    spread = (pl.col("first").min() < pl.col("first").max()) & (pl.col("second").min() < pl.col("second").max())
    return pl.when(spread).then(pl.corr("first", "second").clip(-1.0, 1.0))
