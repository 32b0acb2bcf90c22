import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from tasks.reports.group_ranks import rank_agreement


def frame(groups: list[int], first: list[float | None], second: list[float | None]) -> pl.DataFrame:
    numbers = {"a": pl.Series(first, dtype=pl.Float64), "b": pl.Series(second, dtype=pl.Float64)}
    return pl.DataFrame({"group": groups, **numbers})


def test_scipy_agrees_over_all_and_within_groups() -> None:
    random = np.random.default_rng(3)
    groups = np.repeat(np.arange(40), 8)
    first = np.round(random.normal(size=320) + groups / 20, 1)  # rounded, so that there are ties
    second = np.round(first + random.normal(size=320), 1)
    found = rank_agreement(frame(groups.tolist(), first.tolist(), second.tolist()), "a", "b")
    assert found.overall == pytest.approx(spearmanr(first, second).statistic, abs=1e-12)
    within = [spearmanr(first[groups == group], second[groups == group]).statistic for group in range(40)]
    assert found.within_groups == pytest.approx(np.mean(within), abs=1e-12)
    assert (found.pairs, found.groups, found.groups_undefined) == (320, 40, 0)


def test_by_hand() -> None:
    # Group 0 keeps its order, group 1 reverses it, group 2 is constant on one side, group 3 has a single pair.
    found = rank_agreement(
        frame([0, 0, 0, 1, 1, 2, 2, 3, 3], [1, 2, 3, 1, 2, 5, 5, 9, None], [10, 20, 30, 2, 1, 1, 2, 4, 7]), "a", "b"
    )
    assert found.within_groups == pytest.approx(0.0)
    assert (found.pairs, found.groups, found.groups_undefined) == (8, 2, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [3.0, 3.0]), ([1.0], [2.0]), ([None], [None]), ([], [])],
)
def test_without_spread_there_is_no_correlation(first: list[float | None], second: list[float | None]) -> None:
    found = rank_agreement(frame([0] * len(first), first, second), "a", "b")
    assert (found.overall, found.within_groups) == (None, None)


values = st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=40)


@given(values)
def test_only_the_order_counts(rows: list[tuple[int, int, int]]) -> None:
    groups, first, second = (list(column) for column in zip(*rows, strict=True))
    plain = rank_agreement(frame(groups, first, second), "a", "b")
    bent = rank_agreement(frame(groups, [float(np.exp(x)) for x in first], [x**3 + 7.0 for x in second]), "a", "b")
    assert plain == bent
    turned = rank_agreement(frame(groups, [-x for x in first], second), "a", "b")
    for here, there in ((plain.overall, turned.overall), (plain.within_groups, turned.within_groups)):
        assert (here is None) == (there is None)
        assert here is None or here == pytest.approx(-(there or 0.0), abs=1e-12)
