"""SIGKILL at any moment and before any operation on the disk: the run goes on and comes to the same end."""

import functools
import os
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.chaos import settings
from tests.chaos.campaign import Arguments, Campaign, Census, Fall, Plan, random_plans, undisturbed
from tests.chaos.comparison import Golden
from tests.chaos.processes import ForkServer, start_afresh

pytestmark = pytest.mark.chaos
SEED = int(os.environ.get("CHAOS_SEED", "0"))
KILLS = int(os.environ.get("CHAOS_KILLS", "110"))
MAX_OF_A_RUN = 20
FRESH = 5
"""Kills of processes that were not forked; they take as long to start as a person's."""
SHARES = {"images": 0.4, "text": 0.25, "ahead": 0.25, "supervised": 0.1}


def forked(server: ForkServer, arguments: Arguments, folder: Path) -> tuple[Golden, Census]:
    """The undisturbed run; the first process also fills the file caches, the second one is timed."""
    undisturbed(server.start, arguments, folder / "first")
    return undisturbed(server.start, arguments, folder)


@pytest.mark.parametrize("kind", SHARES)
def test_killed_anywhere(
    kind: str, fork_server: ForkServer, tmp_path: Path, noted: Callable[[list[Fall]], None]
) -> None:
    arguments, rng = getattr(settings, kind), random.Random(f"{SEED} {kind}")
    (tmp_path / "first").mkdir()
    golden, census = forked(fork_server, arguments, tmp_path)
    campaign, kills = Campaign(golden, arguments, fork_server.start, tmp_path), round(SHARES[kind] * KILLS)
    noted(campaign.falls)
    while len(campaign.falls) < kills:
        most = min(MAX_OF_A_RUN, kills - len(campaign.falls))
        campaign.one_run(islice(random_plans(rng, census, campaign), most))


def test_commands_killed_at_any_moment(
    environment: dict[str, str], tmp_path: Path, noted: Callable[[list[Fall]], None]
) -> None:
    start = functools.partial(start_afresh, environment=environment)
    golden, census = undisturbed(start, settings.images, tmp_path)
    campaign, rng = Campaign(golden, settings.images, start, tmp_path), random.Random(SEED)
    noted(campaign.falls)
    while len(campaign.falls) < FRESH:
        moments = (Plan(rng.uniform(0.3, 0.9) * census.seconds) for _ in range(FRESH - len(campaign.falls)))
        campaign.one_run(moments)
