"""Which rows make a minibatch, and which of them go through the model together."""

from collections.abc import Iterator, Sequence

import numpy as np


def minibatches(rows: int, minibatch_size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Row indices of each minibatch; every epoch sees each row once, in an order of its own."""
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(rows).tolist()
        for start in range(0, rows, minibatch_size):
            yield order[start : start + minibatch_size]


def microbatches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Positions that go through the model together, of like length, so that little of a pass is padding.

    Args:
        lengths: tokens of each row.
        size: rows a microbatch.
    """
    # Stable: rows of one length keep the order that the minibatch gave them.
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return [order[start : start + size] for start in range(0, len(order), size)]
