import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.reports.rewards_analysis.side_labels import spread_apart


def test_those_that_collide_share_the_room() -> None:
    assert spread_apart([0.5, 0.5, 0.9], gap=0.1) == pytest.approx([0.45, 0.55, 0.9])
    assert spread_apart([0.9, 0.1], gap=0.1) == [0.9, 0.1]
    assert spread_apart([], gap=0.1) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 0.2))
def test_they_keep_their_order_and_their_distance(positions: list[float], gap: float) -> None:
    placed = spread_apart(positions, gap)
    order = sorted(range(len(positions)), key=lambda index: (positions[index], index))
    for previous, later in itertools.pairwise(order):
        assert placed[later] - placed[previous] >= gap - 1e-9
    # Moving the labels as little as the least squares need keeps their mean.
    assert sum(placed) == pytest.approx(sum(positions))
