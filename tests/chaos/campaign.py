"""Runs that are killed and started again until they end."""

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

from tests.chaos.comparison import Golden, require_same, summary_of
from tests.chaos.places import Place, place_of
from tests.chaos.processes import Order, Process, kill
from tests.chaos.trail import Operation, read_sight
from tests.flows.conftest import Runs

SECONDS_AT_MOST = 600.0
_OF_MOVING_AWAY = 14
"""Operations that it takes."""

Arguments = Callable[[Runs, str], list[str]]
Start = Callable[[Order], Process]


@dataclass(frozen=True)
class Plan:
    """How one start is to end: after so many seconds, or right before an operation; by default not before its end.

    Attributes:
        seconds: from the start of the process.
        operation: on the file system.
        alone: whether the process alone is killed, or its group.
    """

    seconds: float = SECONDS_AT_MOST
    operation: Operation | None = None
    alone: bool = False

    @property
    def how(self) -> str:
        """In words."""
        return "at an operation" if self.operation else "at a moment"


@dataclass(frozen=True)
class Fall:
    """A kill that fell.

    Attributes:
        run: that it hit.
        place: where in the run.
        how: what decided it.
    """

    run: str
    place: Place
    how: str


@dataclass(frozen=True)
class Census:
    """What an undisturbed process did.

    Attributes:
        seconds: from its start to its end.
        operations: of each name on the file system.
    """

    seconds: float
    operations: Mapping[str, int]


@dataclass
class Campaign:
    """One configuration, killed again and again.

    Attributes:
        golden: what every run must come to.
        arguments: of the command line for a run of this name in a storage root.
        start: begins the process.
        folder: for storage roots, one a run; records beside a run would spare the next one its work.
        falls: kills so far.
        ended: runs that came to their end.
    """

    golden: Golden
    arguments: Arguments
    start: Start
    folder: Path
    falls: list[Fall] = field(default_factory=list)
    ended: int = 0

    def one_run(self, plans: Iterator[Plan]) -> None:
        """Kill a run by these plans until it ends, let it end when there are no more, and compare."""
        name = f"run-{self.ended + 1:03d}"
        runs = Runs(self.folder / name)
        order = Order(self.arguments(runs, name), runs.root, self.folder)
        falls: list[Fall] = []
        for plan in chain(plans, repeat(Plan())):
            code = killed_or_ended(self.start, order, plan)
            if code == 0:
                break
            assert code == -9, f"{name} ended with {code} after {falls}\n{order.output.read_text()[-6000:]}"
            falls.append(Fall(name, place_of(read_sight(order.trail)), plan.how))
            self.falls.append(falls[-1])
        try:
            require_same(self.golden, runs, name, order.output)
        except AssertionError as error:
            raise AssertionError(f"{name} is not as the undisturbed run after {falls}: {error}") from error
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
    """A whole run in a process of its own, and what it took."""
    runs = Runs(folder / "undisturbed")
    order, begun = Order(arguments(runs, "undisturbed"), runs.root, folder), time.monotonic()
    code = killed_or_ended(start, order, Plan())
    seconds = time.monotonic() - begun
    assert code == 0, f"undisturbed it ended with {code}\n{order.output.read_text()}"
    golden = Golden(runs, "undisturbed", summary_of(order.output)["policy_digest"])
    return golden, Census(seconds, json.loads(order.census.read_text()))


def random_plans(rng: random.Random, census: Census, campaign: Campaign) -> Iterator[Plan]:
    """Half of the kills at any moment, each as likely; half at any kind of operation, rare ones as likely.

    After a kill between an artifact's files and its manifest, the next one hits the moving away of what is there.
    """
    followed = len(campaign.falls)
    while True:
        alone, last = rng.random() < 0.5, campaign.falls[-1:]
        if last and last[0].place.step == "commit: manifest" and followed < len(campaign.falls):
            followed = len(campaign.falls)
            yield Plan(operation=Operation("_move_away", rng.randint(1, _OF_MOVING_AWAY)))
        elif rng.random() < 0.5:
            # Without memory of where the run is: over many starts all moments of a run are hit alike.
            yield Plan(rng.expovariate(3.0 / census.seconds), alone=alone)
        else:
            name = rng.choice(sorted(census.operations))
            yield Plan(operation=Operation(name, rng.randint(1, max(1, census.operations[name] // 4))))
