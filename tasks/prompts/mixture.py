"""Assign the places of a sampling round to the prompt sets in proportion to their weights."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np


def scheduled_sets(weights: Sequence[float], *, first: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return places [first, first + count) of an endless stream that serves several sets by weight.

    After any number t of places, a set of share s has been served more than t s - 1 and less than t s + 1 times. A set
    may be served its next time only when that keeps it below t s + 1; of those, the one that would fall behind soonest
    is served. That this never fails is the optimality of earliest deadlines for unit jobs (Baruah, Cohen, Plaxton and
    Varvel, 1996, Proportionate progress, section 3). The stream repeats itself after the smallest number of places
    that gives every set an integer number of places, so a late place costs no more than one period.

    Args:
        weights: one per set, above 0; read as exact decimal numbers.
        first: places before the first wanted one.
        count: places wanted.

    Returns:
        The index of the set, and how often it was served before, for each place.
    """
    shares = _integer_shares(weights)
    period = sum(shares)
    rounds, skipped = divmod(first, period)
    served = [0] * len(shares)
    places = []
    for place in range(skipped + count):
        # In integers: served < (place + 1) share / period, and the place by which the next one is due.
        waiting = [index for index, share in enumerate(shares) if served[index] * period < (place + 1) * share]
        chosen = min(waiting, key=lambda index: -(-(served[index] + 1) * period // shares[index]))
        if place >= skipped:
            places.append((chosen, rounds * shares[chosen] + served[chosen]))
        served[chosen] += 1
    return tuple(places)


def sampled_sets(weights: Sequence[float], *, count: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Sample independent places: each set gets its share to within one, and exactly on average.

    Systematic sampling: equally spaced points with one random offset fall into the sets' intervals.

    Args:
        weights: one per set, above 0; read as exact decimal numbers.
        count: places wanted.
        seed: for the offset.

    Returns:
        As for :func:`scheduled_sets`, with no set served before.
    """
    shares = _integer_shares(weights)
    offset = Fraction(int(np.random.PCG64(np.random.SeedSequence(seed)).random_raw()), 2**64)
    points = [(offset + point) / count * sum(shares) for point in range(count)]
    starts = [sum(shares[:index]) for index in range(len(shares) + 1)]
    return tuple(
        (index, place)
        for index, (low, high) in enumerate(itertools.pairwise(starts))
        for place in range(sum(low <= point < high for point in points))
    )


def _integer_shares(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in proportion to the weights."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    scaled = [int(fraction * scale) for fraction in exact]
    return [number // math.gcd(*scaled) for number in scaled]
