"""Time the iterations of a flow, alternating with what it is compared with."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.reports.iteration import IterationRecord

ROUNDS, STEPS = 6, 2


class Timings:
    """A hook that times the iterations, and lets the peers run after each round of them.

    What an iteration leaves to a thread ends in the next one, so the one after the peers does not count.
    """

    def __init__(self, run_peers: Callable[[], None]) -> None:
        self.run_peers = run_peers
        self.since: float | None = None
        self.iterations: list[float] = []
        self.stages: dict[str, list[float]] = {"rollouts": [], "update": []}
        self.steps: list[float] = []
        self.least: dict[str, list[float]] = {}

    def __call__(self, record: "IterationRecord") -> None:
        now = time.perf_counter()
        if self.since is not None:
            self.iterations.append(now - self.since)
            for stage, seconds in self.stages.items():
                seconds.append(record.seconds[stage])
        self.since = now
        if record.iteration % (STEPS + 1) == 0:
            self.run_peers()
            self.since = None
