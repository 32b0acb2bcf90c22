import dataclasses

import numpy as np
import polars as pl
import pytest

from tasks.reports.rewards_analysis.quantiles import BINS, Histogram, histogram_of, quantiles_of


def test_numpy_agrees() -> None:
    values = np.random.default_rng(0).normal(size=777)
    found = quantiles_of(pl.Series([*values, None]))
    assert found is not None
    expected = np.quantile(values, [0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1])
    assert dataclasses.astuple(found) == pytest.approx(tuple(expected))
    histogram = histogram_of(pl.Series(values))
    assert histogram is not None
    assert histogram.counts == tuple(np.histogram(values, BINS)[0])


def test_values_between_0_and_1_keep_that_scale() -> None:
    histogram = histogram_of(pl.Series([0.3, 0.6, 1.0, None]))
    assert histogram is not None
    assert (histogram.low, histogram.high) == (0.0, 1.0)
    assert [index for index, count in enumerate(histogram.counts) if count] == [12, 24, BINS - 1]


def test_equal_values_have_a_scale_of_their_own() -> None:
    assert histogram_of(pl.Series([7.0, 7.0])) == Histogram(6.5, 7.5, (0,) * 20 + (2,) + (0,) * 19)


def test_nothing_has_no_quantiles() -> None:
    nothing = pl.Series([None, None], dtype=pl.Float64)
    assert quantiles_of(nothing) is None
    assert histogram_of(nothing) is None
