"""SIGKILL of the training process, of a worker or of its child, at random moments: the run ends the same."""

import os
import random
from pathlib import Path

import pytest

from tests.chaos import settings
from tests.chaos.campaign import undisturbed
from tests.chaos.processes import ForkServer
from tests.chaos.workers import WorkerCampaign, serving

pytestmark = pytest.mark.chaos
SEED = int(os.environ.get("CHAOS_SEED", "0"))
KILLS = int(os.environ.get("CHAOS_WORKER_KILLS", "24"))
MAX_KILLS_PER_RUN = 8
POOL = "chaos"


def test_killed_among_workers(shared_fork_server: ForkServer, tmp_path: Path) -> None:
    arguments, rng = settings.on_pool(POOL), random.Random(SEED)
    with serving(shared_fork_server, POOL, 2, tmp_path) as workers:
        (tmp_path / "cold").mkdir()
        # The first run waits for the workers to be there and to import; the second one is timed.
        undisturbed(shared_fork_server.start, arguments, tmp_path / "cold")
        golden, census = undisturbed(shared_fork_server.start, arguments, tmp_path)
        campaign = WorkerCampaign(golden, arguments, shared_fork_server, workers, census.seconds, tmp_path)
        while len(campaign.kills) < KILLS:
            campaign.one_run(rng, min(MAX_KILLS_PER_RUN, KILLS - len(campaign.kills)))
