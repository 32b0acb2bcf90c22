"""Samples and scores as frames, as tests write them down."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

Values = Sequence[float | None]


def made_samples(
    groups: Sequence[str],
    before: Values,
    after: Values,
    *,
    advantages: tuple[Values, Values] | None = None,
    rewards: Mapping[str, Values] | None = None,
    runs: Sequence[str] | None = None,
    prompts: Sequence[str] | None = None,
) -> pl.DataFrame:
    """Samples s0, s1, ... with a previous and a later scoring, one a group name; `rewards` are columns."""
    count = len(groups)
    was, now = advantages or ([0.0] * count, [0.0] * count)
    numbers = {"reward_before": before, "reward_after": after, "advantage_before": was, "advantage_after": now}
    prompts = prompts or [f"prompt of {group}" for group in groups]
    return _frame(groups, runs, {"prompt": prompts}, {**numbers, **(rewards or {})})


def made_scores(
    groups: Sequence[str],
    rewards: Mapping[str, Values],
    *,
    iterations: Sequence[int] | None = None,
    seconds: float | Values = 0.5,
    failures: Mapping[str, Sequence[str | None]] | None = None,
) -> pl.DataFrame:
    """Samples s0, s1, ..., one a group name, each scored by every reward; raw is ten times the value."""
    count = len(groups)
    spent = [seconds] * count if isinstance(seconds, float) else seconds
    parts = []
    for label, values in rewards.items():
        failure = pl.Series((failures or {}).get(label, [None] * count), dtype=pl.String)
        frame = _frame(groups, None, {"label": [label] * count}, {"value": values, "seconds": spent})
        frame = frame.with_columns(failure=failure, raw=pl.col("value") * 10)
        parts.append(frame.with_columns(iteration=pl.Series(iterations)) if iterations else frame)
    return pl.concat(parts)


def _frame(
    groups: Sequence[str], runs: Sequence[str] | None, texts: Mapping[str, Any], numbers: Mapping[str, Values]
) -> pl.DataFrame:
    count = len(groups)
    return pl.DataFrame(
        {
            "run": list(runs or ["run"] * count),
            "iteration": [1] * count,
            "sample_id": [f"s{index}" for index in range(count)],
            "group_id": list(groups),
            "dataset": ["default"] * count,
            **texts,
            **{name: pl.Series(values, dtype=pl.Float64) for name, values in numbers.items()},
        }
    )
