"""Every prompt set gets its share at every moment, against plain fractions."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prompts.mixture import sampled_sets, scheduled_sets

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def written(weights: list[int], scale: int) -> list[float]:
    return [weight / scale for weight in weights]


class TestScheduledSets:
    @given(WEIGHTS, st.sampled_from([1, 10, 100]))
    def test_no_set_is_ever_a_whole_place_ahead_or_behind(self, weights: list[int], scale: int) -> None:
        served = [0] * len(weights)
        places = scheduled_sets(written(weights, scale), first=0, count=2 * sum(weights) + 3)
        for number, (chosen, before) in enumerate(places, start=1):
            assert before == served[chosen]
            served[chosen] += 1
            for times, weight in zip(served, weights, strict=True):
                assert abs(times - Fraction(number * weight, sum(weights))) < 1

    @given(WEIGHTS, st.integers(0, 400), st.integers(1, 60))
    def test_any_part_is_cut_from_the_same_stream(self, weights: list[int], first: int, count: int) -> None:
        shares = written(weights, 10)
        stream = scheduled_sets(shares, first=0, count=first + count)
        assert scheduled_sets(shares, first=first, count=count) == stream[first:]

    def test_worked_by_hand(self) -> None:
        # Shares 1/2, 3/10 and 1/5. For each place those who may be served, with the place by which they must be:
        # 1: a 2, b 4, c 5 -> a. 2: b 4, c 5 -> b. 3: a 4, c 5 -> a. 4: b 7, c 5 -> c. 5: a 6, b 7 -> a.
        # 6: b 7, c 10 -> b. 7: a 8, b 10, c 10 -> a. 8: b 10, c 10 -> b, the first of equals. 9: a 10, c 10 -> a.
        # 10: c 10 -> c.
        places = scheduled_sets([0.5, 0.3, 0.2], first=0, count=10)
        assert "".join("abc"[chosen] for chosen, _ in places) == "abacababac"

    def test_a_late_place_costs_no_more_than_a_period(self) -> None:
        assert scheduled_sets([0.7, 0.3], first=10**15, count=10) == tuple(
            (chosen, before + 10**14 * (7, 3)[chosen])
            for chosen, before in scheduled_sets([0.7, 0.3], first=0, count=10)
        )

    def test_weights_are_decimal_numbers_in_any_unit(self) -> None:
        wanted = scheduled_sets([1.0, 2.0, 4.0], first=3, count=30)
        assert scheduled_sets([0.1, 0.2, 0.4], first=3, count=30) == wanted
        assert scheduled_sets([1e-7, 2e-7, 4e-7], first=3, count=30) == wanted


class TestSampledSets:
    @given(WEIGHTS, st.integers(1, 50), st.integers(0, 2**63 - 1))
    def test_shares_within_one(self, weights: list[int], count: int, seed: int) -> None:
        places = sampled_sets(written(weights, 10), count=count, seed=seed)
        assert len(places) == count
        times = Counter(chosen for chosen, _ in places)
        for index, weight in enumerate(weights):
            assert abs(times[index] - Fraction(count * weight, sum(weights))) < 1
            assert [before for chosen, before in places if chosen == index] == list(range(times[index]))

    def test_a_single_place_goes_to_each_set_by_its_weight(self) -> None:
        times = Counter(sampled_sets([1.0, 3.0], count=1, seed=seed)[0][0] for seed in range(3000))
        # 750 are expected, with a standard deviation of 23.7; 4.5 of them either side.
        assert times[0] == pytest.approx(750, abs=107)
