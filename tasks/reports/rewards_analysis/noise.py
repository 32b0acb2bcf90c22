"""The same sample scored twice: what differs is noise."""

from dataclasses import dataclass

import polars as pl

from tasks.reports.sample_frames import number_or_none


@dataclass(frozen=True)
class Noise:
    """Differences between two scorings of the same samples.

    Attributes:
        pairs: samples with a value both times.
        mean_difference: mean absolute difference.
        max_difference: largest absolute difference.
        share_differing: share of the pairs that differ at all.
        one_sided: samples with a value one time only.
    """

    pairs: int
    mean_difference: float | None
    max_difference: float | None
    share_differing: float | None
    one_sided: int


def noise_of(pairs: pl.DataFrame) -> Noise | None:
    """Differences between the columns `value` and `again`, to the last bit; None where no sample has either.

    Args:
        pairs: a row a sample that was scored twice; null where a scoring gave none.
    """
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
