"""Moments over calls against numpy's over everything at once."""

import itertools
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.rewards.mix.running import RunningMoments

NULL = math.nan
nullable = st.one_of(st.just(NULL), st.floats(-1000, 1000))
ROWS = st.lists(st.tuples(nullable, nullable), min_size=1, max_size=30)


def of(rows: list[tuple[float, float]]) -> RunningMoments:
    return RunningMoments.of(torch.tensor(rows, dtype=torch.float64).reshape(-1, 2))


def test_by_hand() -> None:
    """1, 3, 8: mean 4, squares 9 + 1 + 16; the second reward was known once."""
    moments = of([(1.0, NULL), (3.0, 7.0), (8.0, NULL)])
    assert moments == RunningMoments((3, 1), (4.0, 7.0), (26.0, 0.0))
    assert moments.stds == (pytest.approx(math.sqrt(13)), 0.0)


def test_two_calls_by_hand() -> None:
    """0, 2 and 7: mean 3, squares 9 + 1 + 16."""
    merged = RunningMoments((2,), (1.0,), (2.0,)).merged(RunningMoments((1,), (7.0,), (0.0,)))
    assert merged == RunningMoments((3,), (3.0,), (26.0,))


@given(ROWS, st.lists(st.integers(0, 30), max_size=4))
def test_any_split_has_the_moments_of_the_whole(rows: list[tuple[float, float]], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    merged = RunningMoments.empty(2)
    for first, last in itertools.pairwise(bounds):
        merged = merged.merged(of(rows[first:last]))
    for index, (count, mean, std) in enumerate(zip(merged.counts, merged.means, merged.stds, strict=True)):
        known = np.array([row[index] for row in rows if not math.isnan(row[index])])
        assert count == len(known)
        size = float(np.abs(known).max(initial=0.0))
        assert mean == pytest.approx(known.mean() if count else 0.0, rel=1e-12, abs=1e-12 * size)
        assert std == pytest.approx(known.std(ddof=1) if count > 1 else 0.0, rel=1e-12, abs=1e-12 * size)


def test_a_small_spread_on_a_large_mean_survives_many_calls() -> None:
    """The sum of squares less the square of the sum would have lost it: 1e14 in fp64 keeps two digits behind it."""
    values = 1e7 + torch.linspace(0.0, 0.01, 1001, dtype=torch.float64)
    merged = RunningMoments.empty(1)
    for chunk in values.split(7):
        merged = merged.merged(RunningMoments.of(chunk.unsqueeze(-1)))
    assert merged.stds[0] == pytest.approx(float(values.std()), rel=1e-6)


def test_equal_values_have_no_spread_over_many_calls() -> None:
    """The mean of three 0.1 is not 0.1 in binary."""
    merged = RunningMoments.empty(1)
    for _ in range(50):
        merged = merged.merged(RunningMoments.of(torch.full((3, 1), 0.1, dtype=torch.float64)))
    assert merged.stds == (0.0,)


def test_exact_as_json() -> None:
    moments = of([(0.1, NULL), (1 / 3, 2.0**-60), (1e-300, 7.7)])
    stored = json.loads(json.dumps(asdict(moments)))
    assert RunningMoments(**{name: tuple(numbers) for name, numbers in stored.items()}) == moments


def test_another_number_of_rewards_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards and of 3"):
        RunningMoments.empty(2).merged(RunningMoments.empty(3))
