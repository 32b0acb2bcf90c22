"""The samples whose rank moved most."""

import polars as pl

from tasks.reports.rescoring.compare import REWARDS, read_samples

MAX = 20


def moved_most(samples: pl.DataFrame, count: int = MAX) -> pl.DataFrame:
    """The samples that moved, those that moved furthest first; fewer where fewer moved.

    Ranks count from 1, the highest reward, among the siblings that have a reward on both sides; equal rewards share
    the mean of their ranks. Samples are ordered by the places that they moved within their group; those that moved as
    many, by the points that they moved among all samples; then by run and sample id.

    Args:
        samples: as for :func:`compare`.
        count: most rows.

    Returns:
        The rows of `samples` with siblings, rank_before, rank_after, places (positive: it rose), percentile_before,
        percentile_after (100 is the highest reward of all samples, 0 the lowest, 50 where there is but one) and points.

    Raises:
        ValueError: as of :func:`compare`.
    """
    rated = read_samples(samples).drop_nulls(REWARDS)
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
