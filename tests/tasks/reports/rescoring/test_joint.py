import numpy as np
import polars as pl

from tasks.reports.rescoring.joint import BINS, Axis, joint_counts


def test_numpy_counts_the_same() -> None:
    random = np.random.default_rng(1)
    before, after = random.normal(size=3000), random.normal(size=3000)
    joint = joint_counts(pl.DataFrame({"x": before, "y": after}), "x", "y")
    expected, _, _ = np.histogram2d(before, after, bins=BINS)
    found = np.zeros((BINS, BINS))
    for i, j, count in joint.cells:
        found[i, j] = count
    assert np.array_equal(found, expected)
    assert joint.marginal(0) == tuple(expected.sum(1))
    assert joint.marginal(1) == tuple(expected.sum(0))


def test_equal_values_lie_in_one_cell() -> None:
    joint = joint_counts(pl.DataFrame({"x": [0.5, 0.5, None], "y": [0.25, 0.25, 1.0]}), "x", "y")
    assert joint.cells == ((0, 0, 2),)
    assert joint.before == Axis(0.5, 0.5)
