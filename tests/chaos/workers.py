"""Workers of a pool that are killed with the run they work for, and replaced."""

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.campaign import Arguments
from tests.chaos.operations import Golden, require_same
from tests.chaos.processes import ForkServer, Order, Process, kill
from tests.flows.conftest import Runs

MAX_SECONDS = 900.0
SECONDS_TO_START = 240.0
VICTIMS = ("the training process", "a worker", "a worker's child")


@dataclass
class Workers:
    """Living workers of one pool.

    Attributes:
        server: forks them.
        pool: that they serve.
        folder: for what they say.
    """

    server: ForkServer
    pool: str
    folder: Path
    living: list[Process] = field(default_factory=list)
    started: int = 0

    def wait(self) -> None:
        """Until all of them serve the pool, which they make."""
        limit = time.monotonic() + SECONDS_TO_START
        said = [self.folder / f"{self.pool}-{number:03d}" / "output" for number in range(1, self.started + 1)]
        while not all(output.exists() and "started!" in output.read_text() for output in said):
            assert time.monotonic() < limit, [output.read_text() for output in said if output.exists()]
            time.sleep(0.1)

    def add(self) -> None:
        """Start one more."""
        self.started += 1
        scratch = self.folder / f"{self.pool}-{self.started:03d}"
        scratch.mkdir()
        self.living.append(self.server.start(Order(["worker", self.pool], scratch, scratch)))

    def kill_one(self, rng: random.Random) -> None:
        """Kill the whole of one, and start another in its place."""
        victim = self.living.pop(rng.randrange(len(self.living)))
        kill(victim, alone=False)
        assert victim.wait(60) == -signal.SIGKILL, "a worker ended by itself"
        self.add()

    def kill_a_child(self, rng: random.Random) -> bool:
        """Kill a process in which a worker does stages; False where there is none yet."""
        children = [child for worker in self.living for child in psutil.Process(worker.pid).children()]
        if not children:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rng.choice(children).pid, signal.SIGKILL)
        return True

    def close(self) -> None:
        """End all of them."""
        for worker in self.living:
            kill(worker, alone=False)
            worker.wait(60)


@contextlib.contextmanager
def serving(server: ForkServer, pool: str, count: int, folder: Path) -> Iterator[Workers]:
    """So many workers of a pool until the end of the context."""
    workers = Workers(server, pool, folder)
    try:
        for _ in range(count):
            workers.add()
        workers.wait()
        yield workers
    finally:
        workers.close()


@dataclass
class WorkerCampaign:
    """One configuration whose stages are done by workers, any process of which is killed.

    Attributes:
        golden: what every run must come to, made by workers that were let be.
        arguments: of the command line for a run of this name in a storage root.
        server: forks the training process.
        workers: that do its stages.
        seconds: that an undisturbed run takes.
        folder: for storage roots.
        kills: what was killed so far.
        ended: runs that came to their end.
    """

    golden: Golden
    arguments: Arguments
    server: ForkServer
    workers: Workers
    seconds: float
    folder: Path
    kills: list[str] = field(default_factory=list)
    ended: int = 0

    def one_run(self, rng: random.Random, most: int) -> None:
        """Kill a random process of a run at random moments, at most so often, and compare what it comes to."""
        name = f"pool-run-{self.ended + 1:03d}"
        runs = Runs(self.folder / name)
        order = Order(self.arguments(runs, name), runs.root, self.folder)
        kills: list[str] = []
        training = self.server.start(order)
        while True:
            code = training.wait(rng.expovariate(2.0 / self.seconds) if len(kills) < most else MAX_SECONDS)
            if code is not None:
                break
            assert len(kills) < most, f"{name} has not ended after {kills}\n{order.output.read_text()[-6000:]}"
            victim = rng.choice(VICTIMS)
            if victim == VICTIMS[0]:
                kill(training, alone=rng.random() < 0.5)
                assert training.wait(60) == -signal.SIGKILL
                training = self.server.start(order)
            elif victim == VICTIMS[1]:
                self.workers.kill_one(rng)
            elif not self.workers.kill_a_child(rng):
                continue
            kills.append(victim)
            self.kills.append(victim)
        assert code == 0, f"{name} ended with {code} after {kills}\n{order.output.read_text()[-6000:]}"
        require_same(self.golden, runs, name, order.output)
        assert [path.name for path in runs.path(".calls", run=name).iterdir()] == []
        shutil.rmtree(runs.root)
        self.ended += 1
