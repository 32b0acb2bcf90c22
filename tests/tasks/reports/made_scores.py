"""Scores in long form, as tests write them down."""

from collections.abc import Mapping, Sequence

import polars as pl

Values = Sequence[float | None]


def made(
    groups: Sequence[str],
    rewards: Mapping[str, Values],
    *,
    iterations: Sequence[int] | None = None,
    seconds: float | Values = 0.5,
    failures: Mapping[str, Sequence[str | None]] | None = None,
) -> pl.DataFrame:
    """Samples s0, s1, ..., one a group name, each scored by every reward; raw is ten times the value."""
    parts = []
    for label, values in rewards.items():
        count = len(groups)
        spent = [seconds] * count if isinstance(seconds, float) else list(seconds)
        value = pl.Series(values, dtype=pl.Float64)
        parts.append(
            pl.DataFrame(
                {
                    "run": ["run"] * count,
                    "iteration": list(iterations or [1] * count),
                    "group_id": list(groups),
                    "sample_id": [f"s{index}" for index in range(count)],
                    "dataset": ["default"] * count,
                    "label": [label] * count,
                    "value": value,
                    "raw": value * 10,
                    "seconds": pl.Series(spent, dtype=pl.Float64),
                    "failure": pl.Series((failures or {}).get(label, [None] * count), dtype=pl.String),
                }
            )
        )
    return pl.concat(parts)
