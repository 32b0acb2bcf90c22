import math

import polars as pl
import pytest

from tasks.reports.group_spread import Spread, spread_of


def spread(groups: list[int], values: list[float | None]) -> Spread:
    return spread_of(pl.DataFrame({"group": groups, "a": pl.Series(values, dtype=pl.Float64)}), "a")


def test_by_hand() -> None:
    # Deviations: of group 0 sqrt(2), of group 1 zero; group 2 has one value, group 3 none.
    found = spread([0, 0, 1, 1, 2, 2, 3], [1, 3, 5, 5, 7, None, None])
    assert found.mean == pytest.approx(21 / 5)
    assert found.std == pytest.approx(math.sqrt(5.2))
    assert found.within_groups == pytest.approx(math.sqrt(2) / 2)
    assert (found.groups, found.groups_without_spread) == (3, pytest.approx(2 / 3))
    assert (found.samples, found.values, found.null_share) == (7, 5, pytest.approx(2 / 7))


def test_equal_values_have_no_spread_to_the_last_bit() -> None:
    found = spread([0] * 7, [0.1] * 7)
    assert (found.std, found.within_groups, found.groups_without_spread) == (0.0, 0.0, 1.0)


def test_groups_of_one_have_no_spread_to_speak_of() -> None:
    found = spread([0, 1], [1, 2])
    assert (found.within_groups, found.groups_without_spread) == (None, 1.0)
    assert found.std == pytest.approx(math.sqrt(0.5))


def test_without_values_there_is_nothing() -> None:
    assert spread([0, 0], [None, None]) == Spread(2, 0, 1.0, None, None, None, 0, None)
    assert spread([], []) == Spread(0, 0, None, None, None, None, 0, None)
