"""Runs that are killed and started again until they end."""

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

from tests.chaos.operations import Golden, Operation, require_same, summary_of
from tests.chaos.processes import Order, Process, kill
from tests.flows.conftest import Runs

MAX_SECONDS = 600.0
_OPERATIONS_OF_MOVING_AWAY = 14

Arguments = Callable[[Runs, str], list[str]]
Start = Callable[[Order], Process]


@dataclass(frozen=True)
class Plan:
    """How to kill one start; by default it runs to its end.

    Attributes:
        seconds: kill it after so many seconds.
        operation: kill it and its group right before this operation on the file system.
        alone: after `seconds`, kill the process only and not its group.
    """

    seconds: float = MAX_SECONDS
    operation: Operation | None = None
    alone: bool = False


@dataclass(frozen=True)
class Census:
    """Seconds that an undisturbed process took, and its number of operations on the file system by name."""

    seconds: float
    operations: Mapping[str, int]


@dataclass
class Campaign:
    """One configuration, killed again and again.

    Attributes:
        golden: the undisturbed run that every other run must equal.
        arguments: make the command line for a run of this name in a storage root.
        start: starts the process.
        folder: for storage roots, one per run; records of a shared root would spare the next run its work.
        kills: the plans that killed a process so far.
        ended: number of runs that came to their end.
    """

    golden: Golden
    arguments: Arguments
    start: Start
    folder: Path
    kills: list[Plan] = field(default_factory=list)
    ended: int = 0

    def one_run(self, plans: Iterator[Plan]) -> None:
        """Kill a run by these plans until it ends, let it end when there are no more, and compare."""
        name = f"run-{self.ended + 1:03d}"
        runs = Runs(self.folder / name)
        order = Order(self.arguments(runs, name), runs.root, self.folder)
        kills: list[Plan] = []
        for plan in chain(plans, repeat(Plan())):
            code = killed_or_ended(self.start, order, plan)
            if code == 0:
                break
            assert code == -9, f"{name} ended with {code} after {kills}\n{order.output.read_text()[-6000:]}"
            kills.append(plan)
            self.kills.append(plan)
        try:
            require_same(self.golden, runs, name, order.output)
        except AssertionError as error:
            raise AssertionError(f"{name} differs from the undisturbed run after {kills}: {error}") from error
        shutil.rmtree(runs.root)
        self.ended += 1


def killed_or_ended(start: Start, order: Order, plan: Plan) -> int:
    """Start a process and kill it as planned; its exit code, -9 for one that was killed."""
    process = start(order.killed_at(plan.operation))
    code = process.wait(plan.seconds)
    if code is None:
        kill(process, alone=plan.alone)
        code = process.wait(60)
    assert code is not None, f"a process outlived its kill\n{order.output.read_text()[-6000:]}"
    return code


def undisturbed(start: Start, arguments: Arguments, folder: Path) -> tuple[Golden, Census]:
    """Run to the end in a separate process; the run, and what it took."""
    runs = Runs(folder / "undisturbed")
    order, begun = Order(arguments(runs, "undisturbed"), runs.root, folder), time.monotonic()
    code = killed_or_ended(start, order, Plan())
    seconds = time.monotonic() - begun
    assert code == 0, f"undisturbed it ended with {code}\n{order.output.read_text()}"
    golden = Golden(runs, "undisturbed", summary_of(order.output)["policy_digest"])
    return golden, Census(seconds, json.loads(order.census.read_text()))


def random_plans(rng: random.Random, census: Census) -> Iterator[Plan]:
    """Yield plans for the kills of one run: half at any moment, half at any kind of operation, rare ones as likely.

    After a kill between an artifact's files and its manifest, the next one hits while they are moved away.
    """
    while True:
        if rng.random() < 0.5:
            # Without memory of where the run is: over many starts all moments of a run are hit alike.
            yield Plan(rng.expovariate(3.0 / census.seconds), alone=rng.random() < 0.5)
            continue
        name = rng.choice(sorted(census.operations))
        yield Plan(operation=Operation(name, rng.randint(1, max(1, census.operations[name] // 4))))
        if "write_manifest" in name:
            yield Plan(operation=Operation("quarantine", rng.randint(1, _OPERATIONS_OF_MOVING_AWAY)))
