"""Metrics of sampling rounds, pooled."""

import statistics

import pytest

from tasks.metrics import pool_rounds, stage_metrics
from tasks.storage.artifacts.reference import ArtifactRef


def stage(rows: int, **metrics: float) -> ArtifactRef:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return ArtifactRef(uri="r/x", sha256="0", schema_version=4, rows=rows, digest="d", seconds=0.0, metrics=named)


def test_counts_are_summed_extremes_taken_and_means_weighted_by_samples() -> None:
    first = stage(6, tokens=7.0, completions__min_length=2.0, completions__max_length=5.0, rewards__a__mean=0.5)
    second = stage(2, tokens=3.0, completions__min_length=1.0, completions__max_length=4.0, rewards__a__mean=0.9)
    assert pool_rounds([first, second]) == {
        "tokens": 10.0,
        "completions/min_length": 1.0,
        "completions/max_length": 5.0,
        "rewards/a/mean": 0.6,
    }


def test_what_functions_report_has_its_own_name_unless_the_run_has_a_metric_of_it() -> None:
    """Means over two functions that report the same, and over two rounds of 6 and 2 rows."""
    stages = {
        ("rollouts", ""): [stage(6, entropy=1.5), stage(2, entropy=1.5)],
        ("rewards", "a"): [stage(6, logged__share=0.5, logged__entropy=9.0), stage(2, logged__share=0.9)],
        ("rewards", "b"): [stage(6, logged__share=0.2, logged__answer__std=3.0), stage(2, logged__answer__std=1.0)],
    }
    found = stage_metrics(stages, None, sampling="rollouts")
    expected = {"entropy": 1.5, "logged/entropy": 9.0, "share": (0.6 + 0.2) / 2, "answer/std": 2.5}
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)
    assert "logged/share" not in found


def test_a_round_without_a_metric_has_no_weight_in_it() -> None:
    assert pool_rounds([stage(6, rewards__a__mean=0.5, rewards__a__null=1.0), stage(2, rewards__a__null=2.0)]) == {
        "rewards/a/mean": 0.5,
        "rewards/a/null": 3.0,
    }


def test_means_and_deviations_are_those_of_all_scored_samples_together() -> None:
    """Each round also has samples that the reward does not apply to, one in the first and three in the second."""
    first, second = [0.1, 0.5, 0.9], [0.2, 0.3]
    rounds = [
        stage(
            len(values) + nulls,
            rewards__a__mean=statistics.fmean(values),
            rewards__a__std=statistics.stdev(values),
            rewards__a__null=float(nulls),
        )
        for values, nulls in ((first, 1), (second, 3))
    ]
    assert pool_rounds(rounds) == pytest.approx(
        {
            "rewards/a/mean": statistics.fmean([*first, *second]),
            "rewards/a/std": statistics.stdev([*first, *second]),
            "rewards/a/null": 4.0,
        }
    )
