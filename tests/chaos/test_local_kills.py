"""SIGKILL at any moment and before any operation on the disk: the run continues and ends the same."""

import os
import random
from itertools import islice
from pathlib import Path

import pytest

from tests.chaos import settings
from tests.chaos.campaign import Campaign, random_plans, undisturbed
from tests.chaos.processes import ForkServer

pytestmark = pytest.mark.chaos
SEED = int(os.environ.get("CHAOS_SEED", "0"))
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
