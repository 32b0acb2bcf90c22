import numpy as np
import polars as pl

from tasks.reports.rewards_analysis.analyse import analyse
from tasks.reports.rewards_analysis.findings import findings
from tests.tasks.reports.rewards_analysis.made_scores import made

GROUPS = "a" * 4 + "b" * 4


def said(scores: pl.DataFrame, repeats: pl.DataFrame | None = None) -> list[tuple[str, str]]:
    return [(finding.subject, finding.said) for finding in findings(analyse(scores, repeats))]


def test_a_healthy_reward_is_not_spoken_of() -> None:
    assert said(made(GROUPS, {"x": [0.1, 0.4, 0.6, 0.9, 0.2, 0.3, 0.7, 0.8]})) == []


def test_each_ailment_is_named_with_its_figure() -> None:
    flat = [("x", "is the same for all siblings in 50.0% of the groups: these teach nothing")]
    assert said(made(GROUPS, {"x": [0.5] * 4 + [0.2, 0.3, 0.7, 0.8]})) == flat
    ceiling = [("x", "is at the ceiling, 1, for 50.0% of the samples")]
    assert said(made(GROUPS, {"x": [1.0, 1.0, 0.5, 0.2] * 2})) == ceiling
    floor = [("x", "is at the floor, 0, for 75.0% of the samples")]
    assert said(made(GROUPS, {"x": [0.0, 0.0, 0.0, 0.2] * 2})) == floor
    assert said(made(GROUPS, {"x": [None] * 8})) == [("x", "has no value for any sample: it teaches nothing")]
    ((_, prompt),) = said(made(GROUPS, {"x": [0.1, 0.101, 0.102, 0.103, 0.9, 0.901, 0.902, 0.903]}))
    assert prompt == "tells prompts apart, not their samples: spread within groups is 0.003 of the whole"


def test_failures_are_told_with_their_reasons() -> None:
    failures = {"x": ["timeout", "timeout", "refused"] + [None] * 5}
    scores = made(GROUPS, {"x": [None, None, None, 0.9, 0.2, 0.3, 0.7, 0.8]}, failures=failures)
    (first, *_) = said(scores)
    assert first == ("x", "failed for 3 samples (37.5%): timeout (2); refused (1)")


def test_noise_is_told_where_it_drowns_the_signal() -> None:
    values = np.array([0.1, 0.4, 0.6, 0.9, 0.2, 0.3, 0.7, 0.8])
    scores = made(GROUPS, {"x": values.tolist()})
    assert said(scores, made(GROUPS, {"x": (values + 0.01).tolist()})) == []
    ((_, noisy),) = said(scores, made(GROUPS, {"x": (values + 0.1).tolist()}))
    assert noisy.startswith("is noisy: two scorings differ by 0.1 on average, ")
    ((_, lost),) = said(scores, made(GROUPS, {"x": [None, *values[1:].tolist()]}))
    assert lost == "gave a value only one of two times for 1 sample"


def test_pairs_that_count_twice_or_pull_apart() -> None:
    values = [0.1, 0.4, 0.6, 0.9, 0.2, 0.3, 0.7, 0.8]
    rewards = {"x": values, "y": [value**2 for value in values], "z": [1 - value for value in values]}
    assert said(made(GROUPS, rewards)) == [
        ("x and y", "order siblings nearly alike (rank correlation 1.00): one counts twice"),
        ("x and z", "pull against each other within groups (rank correlation -1.00)"),
        ("y and z", "pull against each other within groups (rank correlation -1.00)"),
    ]
