"""The short form of `make test-chaos`: a run killed at a few moments and between the steps that must stay together."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from tests.chaos.campaign import Campaign, Plan
from tests.chaos.comparison import Golden
from tests.chaos.operations import Operation
from tests.chaos.processes import ForkServer, forking
from tests.chaos.settings import small_images
from tests.flows.conftest import Runs, Start

PLANS = (
    # Files of rollouts in their place, the manifest not; then while they are moved away.
    Plan(operation=Operation("rename: files.py:write_file_atomically < commit.py:write_manifest", 1)),
    Plan(operation=Operation("rename: run_folder.py:_move < run_folder.py:quarantine", 1)),
    # Scores complete, the record of the second reward not.
    Plan(operation=Operation("rename: files.py:write_file_atomically < prefect_results.py:_keep", 3)),
    Plan(operation=Operation("_save_state", 1)),
    Plan(operation=Operation("write_metrics", 1)),
)
# The last one: what a machine has done by then, and so what is left for the others, is a matter of its speed.
A_MOMENT = Plan(seconds=1.0)


@pytest.fixture(scope="module")
def fork_server(server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    folder = tmp_path_factory.mktemp("fork-server")
    environment = {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "PREFECT_HOME": str(folder)}
    with forking(environment, folder / "log") as started:
        yield started


@pytest.mark.slow
def test_killed_here_and_there(undisturbed: tuple[Runs, Start], fork_server: ForkServer, tmp_path: Path) -> None:
    runs, first = undisturbed
    assert first.summary.policy_digest is not None
    golden = Golden(runs, "run", first.summary.policy_digest)
    campaign = Campaign(golden, small_images, fork_server.start, tmp_path)
    campaign.one_run(iter((*PLANS, A_MOMENT)))
    assert campaign.kills[: len(PLANS)] == list(PLANS)
