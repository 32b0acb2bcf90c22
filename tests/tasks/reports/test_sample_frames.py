import math

import polars as pl
import pytest

from tasks.reports.sample_frames import require_columns, require_unique, settled, with_groups


def column(*values: float | None) -> list[float | None]:
    frame = pl.DataFrame({"a": pl.Series(values, dtype=pl.Float64)})
    return settled(frame, ["a"])["a"].to_list()


def test_what_rounding_left_makes_no_difference() -> None:
    one, other = column(0.1 + 0.2, 0.3)
    assert one == other
    tiny, zero = column(1e-17, 0.0, 0.5)[:2]
    assert tiny == zero
    large, near = column(1e6 * (0.1 + 0.2), 3e5)
    assert large == near


def test_what_differs_stays_different() -> None:
    assert column(0.3, 0.3 + 1e-9) == [0.3, 0.3 + 1e-9]
    small = column(1e-20, 2e-20)
    assert small == pytest.approx([1e-20, 2e-20])


def test_what_is_not_finite_is_not_there() -> None:
    assert column(math.nan, math.inf, -math.inf, None, 1.0) == [None, None, None, None, 1.0]
    assert column(None, math.nan) == [None, None]
    assert settled(pl.DataFrame({"a": [None, None]}), ["a"])["a"].dtype == pl.Float64


def test_groups_of_two_runs_are_not_one() -> None:
    frame = pl.DataFrame({"run": ["a", "b", "a"], "iteration": [1, 1, 1], "group_id": ["g", "g", "g"]})
    first, second, third = with_groups(frame)["group"].to_list()
    assert first == third != second


def test_what_is_missing_or_there_twice_is_named() -> None:
    frame = pl.DataFrame({"run": ["a", "a"], "sample_id": ["s", "s"]})
    with pytest.raises(ValueError, match="scores lack the columns value, raw; they have run, sample_id"):
        require_columns(frame, ["run", "value", "raw"], "scores")
    with pytest.raises(ValueError, match="scores hold run 'a', sample_id 's' more than once"):
        require_unique(frame, ["run", "sample_id"], "scores")
