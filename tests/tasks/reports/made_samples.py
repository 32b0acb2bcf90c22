"""Samples with a previous and a later scoring, as tests write them down."""

from collections.abc import Mapping, Sequence

import polars as pl

Values = Sequence[float | None]


def made(
    groups: Sequence[str],
    before: Values,
    after: Values,
    *,
    advantages: tuple[Values, Values] | None = None,
    rewards: Mapping[str, Values] | None = None,
    runs: Sequence[str] | None = None,
    prompts: Sequence[str] | None = None,
) -> pl.DataFrame:
    """One sample a group name, sample ids s0, s1, ...; `rewards` are columns as they are named."""
    count = len(groups)
    was, now = advantages or ([0.0] * count, [0.0] * count)
    numbers = {"reward_before": before, "reward_after": after, "advantage_before": was, "advantage_after": now}
    return pl.DataFrame(
        {
            "run": list(runs or ["run"] * count),
            "iteration": [1] * count,
            "sample_id": [f"s{index}" for index in range(count)],
            "group_id": list(groups),
            "prompt": list(prompts or [f"prompt of {group}" for group in groups]),
            "dataset": ["default"] * count,
            **{name: pl.Series(values, dtype=pl.Float64) for name, values in {**numbers, **(rewards or {})}.items()},
        }
    )
