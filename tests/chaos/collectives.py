"""A process of a device that counts its collectives by where they are called, and dies before or inside a chosen one.

What a process exchanges with the others is changed nowhere else: between two collectives no process waits for another.
"""

import collections
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tasks.update.process import device_handler
from tests.chaos.operations import Operation, functions_of

ORDERS, HANDLER = "CHAOS_COLLECTIVES", "tests.chaos.collectives:dying_handler"
_CALLED = {
    dist: ("init_process_group", "all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single"),
    functional: ("all_gather_single",),
}
_NAMED = 2
_INSIDE, _LATE = 0.3, 1.5


@dataclass(frozen=True)
class Death:
    """How a process of an update dies.

    Attributes:
        rank: of the process.
        collective: the one before which it dies.
        inside: it dies within the collective, for which the next process comes late.
    """

    rank: int
    collective: Operation
    inside: bool = False


class Orders:
    """The file in which the processes of a test find who has to die, and write what they counted."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.give(None)

    def give(self, death: Death | None) -> None:
        """Have this process die in updates that begin from now on; None: no one."""
        self.file.write_text(json.dumps(death and asdict(death)))

    def census(self) -> Mapping[str, int]:
        """Return how many collectives the last update of a first process had, by name."""
        counted: Mapping[str, int] = json.loads(self.file.with_suffix(".census").read_text())
        return counted


class _Collectives:
    """What a process hears of its collectives."""

    def __init__(self) -> None:
        self.counts = collections.Counter[str]()
        self.death: Death | None = None
        self.rank, self.processes = 0, 1

    def begin(self, orders: Path, member: Mapping[str, Any]) -> None:
        self.counts.clear()
        self.rank, self.processes = member["rank"], member["count"]
        given = json.loads(orders.read_text())
        self.death = given and Death(given["rank"], Operation(**given["collective"]), given["inside"])

    def hear(self, kind: str) -> None:
        name = f"{kind}: {' < '.join(each.rpartition('/')[2] for each in functions_of(sys._getframe(2))[:_NAMED])}"
        self.counts[name] += 1
        death = self.death
        if death is None or (name, self.counts[name]) != (death.collective.name, death.collective.number):
            return
        if self.rank == death.rank:
            if not death.inside:
                _die()
            threading.Timer(_INSIDE, _die).start()
        elif death.inside and self.rank == (death.rank + 1) % self.processes:
            time.sleep(_LATE)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_handler() -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """Return the handler of a device's process, which dies as the file in the variable ORDERS says."""
    handle, heard, orders = device_handler(), _Collectives(), Path(os.environ[ORDERS])
    for module, names in _CALLED.items():
        for name in names:
            setattr(module, name, _heard(heard, name, getattr(module, name)))

    def handle_update(payload: dict[str, Any]) -> dict[str, Any] | None:
        if "update" in payload:
            heard.begin(orders, payload["update"]["member"])
        answer = handle(payload)
        if not heard.rank:
            orders.with_suffix(".census").write_text(json.dumps(heard.counts))
        return answer

    return handle_update


def _heard(heard: _Collectives, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        heard.hear(kind)
        return function(*arguments, **named)

    return called
