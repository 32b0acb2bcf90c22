"""One line of the benchmark's table, and how pairs are timed.

Each module of this package measures one thing: its `measure()` yields a Row as soon as it is known.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of this project, with what it is compared with and what it should reach.

    The goal applies to the ratio where there is something to compare with, and to our own median where there is not.

    Attributes:
        what: what was measured, with its sizes: "update, 16 groups of 4, vocabulary 151,936".
        unit: unit of the rounds: "s", "tokens/s", "MB".
        ours: this project's figure in each round; one entry for what does not vary.
        peer: what `theirs` is, "TRL 1.16 step"; empty without one.
        theirs: the peer's figure in each round, in the order of `ours`; empty without one.
        at_most: the goal where less is better; None without one.
        at_least: the goal where more is better; None without one.
    """

    what: str
    unit: str
    ours: tuple[float, ...]
    peer: str = ""
    theirs: tuple[float, ...] = ()
    at_most: float | None = None
    at_least: float | None = None

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours divided by theirs, round by round; empty without a peer."""
        return tuple(a / b for a, b in zip(self.ours, self.theirs, strict=True)) if self.theirs else ()

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the goal; None without a goal."""
        reached = statistics.median(self.ratios or self.ours)
        if self.at_most is not None:
            return reached <= self.at_most
        return reached >= self.at_least if self.at_least is not None else None


def alternate(rounds: int, *actions: Callable[[], object]) -> list[tuple[float, ...]]:
    """Call the actions in turn, `rounds` times, after one call of each that does not count.

    Returns:
        For each action its seconds of wall time, round by round.
    """
    seconds: list[list[float]] = [[] for _ in actions]
    for counted in (False, *[True] * rounds):
        for action, kept in zip(actions, seconds, strict=True):
            begun = time.perf_counter()
            action()
            if counted:
                kept.append(time.perf_counter() - begun)
    return [tuple(kept) for kept in seconds]
