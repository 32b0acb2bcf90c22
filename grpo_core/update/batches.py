"""Split rows into minibatches, and minibatches into microbatches."""

from collections.abc import Iterator, Sequence

import numpy as np


def minibatches(rows: int, minibatch_size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Yield the row indices of each minibatch; every epoch has each row once, in a new order."""
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(rows).tolist()
        for start in range(0, rows, minibatch_size):
            yield order[start : start + minibatch_size]


def microbatches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Group positions of similar length into microbatches, so that little of a pass is padding.

    Args:
        lengths: tokens of each row.
        size: rows per microbatch.
    """
    # Stable: rows of one length keep their order in the minibatch.
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return [order[start : start + size] for start in range(0, len(order), size)]
