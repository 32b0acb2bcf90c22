"""SIGKILL at any moment, of a run or of its workers, and before any operation on the disk: it ends the same."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest

from tests.chaos import settings
from tests.chaos.campaign import Campaign, random_plans, undisturbed
from tests.chaos.operations import require_same
from tests.chaos.processes import ForkServer, Order, Process, kill
from tests.flows.conftest import Runs

pytestmark = pytest.mark.chaos
SEED = int(os.environ.get("CHAOS_SEED", "0"))
WORKER_KILLS = int(os.environ.get("CHAOS_WORKER_KILLS", "24"))
MAX_KILLS_PER_WORKER_RUN = 8
MAX_SECONDS, SECONDS_TO_START = 900.0, 240.0
POOL = "chaos"


class Workers:
    """Living workers of the pool, forked by the server, each with a folder for what it says."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.living: list[Process] = []
        self.outputs: list[Path] = []

    def add(self) -> None:
        """Start one more."""
        scratch = self.folder / f"{POOL}-{len(self.outputs):03d}"
        scratch.mkdir()
        order = Order(["worker", POOL], scratch, scratch)
        self.outputs.append(order.output)
        self.living.append(self.server.start(order))

    def wait(self) -> None:
        """Until all of them serve the pool, which they make."""
        limit = time.monotonic() + SECONDS_TO_START
        while not all(output.exists() and "started!" in output.read_text() for output in self.outputs):
            assert time.monotonic() < limit, [output.read_text() for output in self.outputs if output.exists()]
            time.sleep(0.1)

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


@pytest.fixture
def workers(shared_fork_server: ForkServer, tmp_path: Path) -> Iterator[Workers]:
    """Two workers of the pool."""
    workers = Workers(shared_fork_server, tmp_path)
    try:
        workers.add()
        workers.add()
        workers.wait()
        yield workers
    finally:
        workers.close()


def killed_until_it_ends(workers: Workers, order: Order, rng: random.Random, mean: float, most: int) -> list[str]:
    """Kill a random process of a run at random moments, `mean` seconds apart, at most so often; what was killed."""
    kills: list[str] = []
    training = workers.server.start(order)
    while True:
        code = training.wait(rng.expovariate(1 / mean) if len(kills) < most else MAX_SECONDS)
        if code is not None:
            break
        assert len(kills) < most, f"it has not ended after {kills}\n{order.output.read_text()[-6000:]}"
        victim = rng.choice(("the training process", "a worker", "a worker's child"))
        if victim == "the training process":
            kill(training, alone=rng.random() < 0.5)
            assert training.wait(60) == -signal.SIGKILL
            training = workers.server.start(order)
        elif victim == "a worker":
            workers.kill_one(rng)
        elif not workers.kill_a_child(rng):
            continue
        kills.append(victim)
    assert code == 0, f"it ended with {code} after {kills}\n{order.output.read_text()[-6000:]}"
    return kills


def test_killed_among_workers(workers: Workers, tmp_path: Path) -> None:
    arguments, rng = settings.on_pool(POOL), random.Random(SEED)
    (tmp_path / "cold").mkdir()
    # The first run waits for the workers to be there and to import; the second one is timed.
    undisturbed(workers.server.start, arguments, tmp_path / "cold")
    golden, census = undisturbed(workers.server.start, arguments, tmp_path)
    kills: list[str] = []
    for number in itertools.count():
        if len(kills) >= WORKER_KILLS:
            break
        name = f"pool-run-{number:03d}"
        runs = Runs(tmp_path / name)
        order = Order(arguments(runs, name), runs.root, tmp_path)
        most = min(MAX_KILLS_PER_WORKER_RUN, WORKER_KILLS - len(kills))
        kills += killed_until_it_ends(workers, order, rng, census.seconds / 2, most)
        require_same(golden, runs, name, order.output)
        assert [path.name for path in runs.path(".calls", run=name).iterdir()] == []
        shutil.rmtree(runs.root)


KILLS = int(os.environ.get("CHAOS_KILLS", "110"))
MAX_KILLS_PER_RUN = 20
SHARES = {"images": 0.25, "both_streams": 0.25, "nft": 0.1, "text": 0.1, "ahead": 0.2, "supervised": 0.1}


@pytest.mark.parametrize("kind", SHARES)
def test_killed_anywhere(kind: str, fork_server: ForkServer, tmp_path: Path) -> None:
    arguments, rng = getattr(settings, kind), random.Random(f"{SEED} {kind}")
    # The first process also fills the file caches, the second one is timed.
    (tmp_path / "first").mkdir()
    undisturbed(fork_server.start, arguments, tmp_path / "first")
    golden, census = undisturbed(fork_server.start, arguments, tmp_path)
    campaign, kills = Campaign(golden, arguments, fork_server.start, tmp_path), round(SHARES[kind] * KILLS)
    while len(campaign.kills) < kills:
        most = min(MAX_KILLS_PER_RUN, kills - len(campaign.kills))
        campaign.one_run(islice(random_plans(rng, census), most))
