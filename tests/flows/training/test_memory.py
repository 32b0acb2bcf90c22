"""What a run keeps in memory from one iteration to the next."""

import gc
from pathlib import Path
from typing import Any

import pytest
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL

from flows.training.hooks import use_hook
from flows.training.prefetch import RolloutPrefetcher
from tasks.progress import Lines
from tasks.reports.iteration import IterationRecord
from tasks.storage.artifacts.reference import ArtifactRef
from tests.chaos.campaign import Campaign, Plan
from tests.chaos.operations import Golden, Operation
from tests.chaos.processes import forking
from tests.chaos.settings import BOTH_STREAMS, OFFLOADED, offloaded
from tests.flows.conftest import Runs

SMALL: dict[str, Any] = {
    "rollout__prompts_per_iteration": 2,
    "rollout__group_size": 2,
    "rollout__max_completion_length": 4,
    "update__minibatch_size": 4,
    "update__micro_batch_size": 4,
    "evaluate__prompts": None,
}


def count_kept() -> dict[str, int]:
    """Count what belongs to iterations: ours by kind, and Prefect's notes of task runs."""
    gc.collect()
    context = FlowRunContext.get()
    assert context is not None
    found = [each for each in gc.get_objects() if type(each) in (ArtifactRef, RolloutPrefetcher)]
    # One of an earlier test may still be there; it does not grow.
    prefetchers = [each for each in found if isinstance(each, RolloutPrefetcher)]
    return {
        "references": len(found) - len(prefetchers),
        "policies": sum(len(each.policies) for each in prefetchers),
        "ahead": sum(len(each.ahead) for each in prefetchers),
        "results": len(context.run_results),
        "assets": len(context.task_run_assets),
        "submitted": len(context.task_runner._cancel_events),  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_it_does_not_grow_with_the_iterations(empty: Runs, staleness: int) -> None:
    kept: dict[int, dict[str, int]] = {}

    def count(record: IterationRecord) -> None:
        if record.iteration in (3, 7):
            kept[record.iteration] = count_kept()

    use_hook(count)
    try:
        empty.start_text(run__iterations=8, run__staleness=staleness, **SMALL)
    finally:
        use_hook(None)
    # Two iterations' worth: what was just made is there a little longer or shorter. The thread that samples ahead drops
    # the policy before its own when it begins, which may be before or after the count.
    # It submits one task a reward, here one, and forgets it once it has ended: at either count it may be scoring. One
    # that is left in each iteration would be four more. Since tasks were last forgotten, before the iteration, it has
    # ended those of none to two iterations, three each; with the update's they would be sixteen more.
    leeway = {"references": 8, "results": 40, "assets": 6, "policies": 1, "submitted": 1}
    assert {name: n for name, n in kept[7].items() if n > kept[3][name] + leeway.get(name, 0)} == {}


PLANS = (
    # In the rollouts; in the update, when the tokens' adapter is written and before the decoder's is; at its end.
    Plan(operation=Operation("rename */iteration_000001/rollouts.manifest.json", 1)),
    Plan(operation=Operation("mkdir */denoising", 1)),
    Plan(operation=Operation("open */training_state.json", 1)),
)


@pytest.mark.slow
def test_offloaded_and_killed_here_and_there_it_ends_as_without(empty: Runs, tmp_path: Path) -> None:
    plain, changes = (
        {name.replace(".", "__"): value for name, value in settings.items()} for settings in (BOTH_STREAMS, OFFLOADED)
    )
    golden = Golden(empty, "plain", str(empty.start("plain", **plain).summary.policy_digest))
    # Under a root of its own, where nothing of the other run can be used again.
    other = Runs(tmp_path / "other")
    moved = other.start("moved", **changes)
    assert moved.summary.policy_digest == golden.digest
    assert other.tables("moved") == empty.tables("plain")
    measured = other.metrics(2, "moved")
    for stage in ("rollouts", "update"):
        assert measured[f"offload/{stage}/moved_gib"] > 0
        assert measured[f"offload/{stage}/moved_seconds"] > 0
    assert not any(name.startswith("offload/") for name in empty.metrics(2, "plain"))

    environment = {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "PREFECT_HOME": str(tmp_path)}
    with forking(environment, tmp_path / "log") as fork_server:
        campaign = Campaign(golden, offloaded, fork_server.start, tmp_path)
        campaign.one_run(iter(PLANS))
    assert campaign.kills == list(PLANS)


def test_lines_forget_a_stage_that_has_ended() -> None:
    lines = Lines()
    for done in (0, 1, 2):
        lines.advance("iteration 1: stage", done, 2)
    assert (lines._begun, lines._printed) == ({}, {})
