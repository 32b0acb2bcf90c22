import polars as pl
import pytest

from tasks.reports.rewards_analysis.agreement import Agreement, agreements_of


def agreement(groups: list[int], first: list[float | None], second: list[float | None]) -> Agreement:
    numbers = {"a": pl.Series(first, dtype=pl.Float64), "b": pl.Series(second, dtype=pl.Float64)}
    (found,) = agreements_of(pl.DataFrame({"group": groups, **numbers}), [("first", "a"), ("second", "b")])
    return found


def test_sides_of_the_mean_by_hand() -> None:
    # Off the mean by -1, 0, 1 and by -2, -1, 3: the middle one lies on the mean by one of them.
    found = agreement([0, 0, 0], [1.0, 2.0, 3.0], [1.0, 2.0, 6.0])
    assert (found.centred, found.same_sign) == (2, 1.0)
    found = agreement([0, 0, 1, 1], [1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 9.0, 3.0])
    assert (found.centred, found.same_sign) == (4, 0.5)


def test_means_are_of_those_that_have_both() -> None:
    # The sibling without a second value would move the first one's mean above 2.
    found = agreement([0, 0, 0], [1.0, 2.0, 90.0], [5.0, 6.0, None])
    assert (found.ranks.pairs, found.centred, found.same_sign) == (2, 2, 1.0)


def test_constant_groups_have_no_side() -> None:
    found = agreement([0] * 3 + [1] * 3, [0.1] * 3 + [0.1, 0.2, 0.6], [1.0, 2.0, 3.0, 0.7, 0.7, 0.7])
    assert (found.centred, found.same_sign, found.ranks.within_groups) == (0, None, None)


def test_equal_deviations_are_zero_whatever_the_last_bit() -> None:
    # The middle one is the mean of the three, but not in floating point.
    found = agreement([0] * 3, [0.1, 0.2, 0.3], [0.0, 0.9, 0.3])
    assert found.centred == 2


def test_nothing_in_common() -> None:
    found = agreement([0, 0], [1.0, None], [None, 2.0])
    assert (found.ranks.pairs, found.ranks.overall, found.centred, found.same_sign) == (
        0,
        None,
        0,
        None,
    )


def test_every_pair_once() -> None:
    frame = pl.DataFrame({"group": [0, 0], "a": [1.0, 2.0], "b": [2.0, 1.0], "c": [1.0, 2.0]})
    found = agreements_of(frame, [("A", "a"), ("B", "b"), ("C", "c")])
    assert [(pair.first, pair.second, pair.same_sign) for pair in found] == [
        ("A", "B", 0.0),
        ("A", "C", 1.0),
        ("B", "C", 0.0),
    ]
    assert found[0].ranks.overall == pytest.approx(-1.0)
