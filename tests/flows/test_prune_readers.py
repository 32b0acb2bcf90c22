"""Readers of a pruned run: told what is gone, or kept what they will need; and prunes that are refused."""

import asyncio
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.inspection.inspect_run import inspect_run
from flows.pipeline.requests import EvaluateRequest, ReplayRequest, RescoreRequest
from flows.pruning.plan import IMAGES, VERSIONS
from flows.pruning.request import PruneRequest
from flows.pruning.scheduled import EVALUATE, RESCORE, TRAIN, ScheduledFlow, means_run
from flows.rescoring.rescore import rescore
from flows.rewards.analysis import AnalysisRequest, analyse_rewards
from grpo_core.errors import InputErrors
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.locks.run_lock import locked
from tests.flows import pruned_runs
from tests.flows.conftest import Runs, Start
from tests.flows.deployment.deployed import deployed, make_pool, on_the_server
from tests.flows.pruned_runs import (
    EVALUATED,
    ITERATIONS,
    PSNR,
    RUN,
    SSIM,
    contents,
    deleted,
    kept,
    pruned,
    refused,
    tree,
)

trained, runs = pruned_runs.trained, pruned_runs.runs


class TestReadersOfWhatIsGone:
    @pytest.fixture
    def gone(self, runs: Runs) -> Runs:
        pruned(runs, policies_every=2, images_older_than="0i")
        return runs

    def test_a_removed_version_is_told_with_what_is_there(self, gone: Runs) -> None:
        told = (
            "--policy: got 1. Its files were removed by `grpo prune --policies-every 2 --policies-last 2`; pruned "
            "has policy versions 2 to 4. Choose one of these; 0 is the model as given."
        )
        result = CliRunner().invoke(application, ["evaluate", RUN, "--policy", "1", "--root", str(gone.root)])
        assert (result.exit_code, result.stderr.strip()) == (2, f"error: {told}")
        with pytest.raises(InputErrors) as caught:
            _ = ReplayRequest(source=RUN, root=str(gone.root), policy=1).plan
        assert str(caught.value) == told
        assert EvaluateRequest(run=RUN, root=str(gone.root)).plan.policy.version == 4

    def test_an_iteration_without_images_is_shown(self, gone: Runs, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        inspection = inspect_run(RUN, root=str(gone.root), iteration=2, html=page)
        (told,) = inspection.warnings
        assert told.startswith("iteration 2: its images were removed on 20")
        assert "`grpo prune --images-older-than 0i`; everything else of it is there" in told
        assert page.read_text().count("image removed") >= 2
        assert inspection.run.finished
        shown = CliRunner().invoke(application, ["inspect", RUN, "--iteration", "2", "--root", str(gone.root)])
        assert shown.exit_code == 0
        assert "its images were removed" in " ".join(shown.output.split())

    def test_the_last_iteration_is_reported_again(self, gone: Runs, trained: tuple[Runs, Start]) -> None:
        start = gone.start(RUN, run__iterations=ITERATIONS, **EVALUATED)
        assert (start.stages, start.summary.policy_digest) == ((), trained[1].summary.policy_digest)

    def test_the_laboratory_scores_nothing_again(self, gone: Runs) -> None:
        summary, analysis = analyse_rewards(AnalysisRequest(RUN, root=str(gone.root)))
        reason = "the images were removed by `grpo prune`"
        assert summary.not_repeated == {"ssim": reason, "psnr": reason}
        assert [reward.noise for reward in analysis.rewards] == [None, None]

    def test_rescoring_needs_images_for_what_is_not_stored(self, gone: Runs) -> None:
        with pytest.raises(InputErrors) as caught:
            rescored(gone, SSIM, {"reward": "jpeg"})
        (told,) = caught.value.errors
        assert str(told) == (
            "rewards.1.jpeg: got 'jpeg'. pruned has no scores of it for iteration 1, 2, 3, 4, whose images were "
            "removed by `grpo prune`. Choose other --iterations, or rewards whose scores are stored."
        )
        assert rescored(gone, {**SSIM, "weight": 0.1}, PSNR) == {"ssim": 0, "psnr": 0}


def rescored(runs: Runs, *rewards: Mapping[str, object]) -> dict[str, int]:
    file = runs.root.parent / "rewards.yaml"
    file.write_text(yaml.safe_dump({"rewards": [dict(reward) for reward in rewards]}))
    request = RescoreRequest(sources=(RUN,), rewards=str(file), name="other", root=str(runs.root))
    return asyncio.run(rescore(request)).summary.computed


class TestScheduled:
    def test_what_an_active_schedule_needs(self, runs: Runs) -> None:
        make_pool()
        file = runs.root.parent / "nightly.yaml"
        file.write_text(yaml.safe_dump({"rewards": [SSIM]}))
        overrides = [each for each in runs.overrides(**EVALUATED) if not each.startswith("run.name")]
        changed = [*overrides, "run.iterations=9", "evaluate.every=3"]
        deployed(run=RUN, cron="0 2 * * *", evaluation=True, rescorings=(file,), overrides=changed)
        requested = {"policies_last": 1, "images_older_than": "0i", "dry_run": True}
        # The training alone has a schedule, and would evaluate version 3 on its way.
        told = pruned(runs, **requested)
        assert "the schedule of grpo train/pruned evaluates it" in kept(told, VERSIONS)["3"]
        assert "1" not in kept(told, VERSIONS)
        assert deleted(told)[IMAGES] == 4
        schedule(f"{RESCORE}/pruned-nightly", active=True)
        schedule(f"{EVALUATE}/pruned", active=True, parameters={"request": {**asked_of(runs), "policy": 1}})
        told = pruned(runs, **requested)
        assert told.schedules
        assert kept(told, VERSIONS)["1"] == "the schedule of grpo evaluate/pruned evaluates it"
        assert IMAGES not in deleted(told)
        assert set(kept(told, IMAGES).values()) == {"the schedule of grpo rescore/pruned-nightly scores them again"}
        for name in (f"{RESCORE}/pruned-nightly", f"{EVALUATE}/pruned"):
            schedule(name, active=False)
        assert deleted(pruned(runs, **requested))[IMAGES] == 4

    def test_a_server_that_does_not_answer(self, runs: Runs) -> None:
        before = tree(runs.root)
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            assert refused(root=str(runs.root), policies_last=1) == [("PREFECT_API_URL", "http://127.0.0.1:9/api")]
        assert tree(runs.root) == before
        with temporary_settings({PREFECT_API_URL: None}):
            assert not pruned(runs, policies_last=1, dry_run=True).schedules

    @pytest.mark.parametrize(
        ("source", "root", "meant"),
        [
            (RUN, "{root}", True),
            ("{root}/pruned", "elsewhere", True),
            ("other", "{root}", False),
            (RUN, "{root}/../copy", False),
            # What is not here may be another machine's way to the same disk.
            (RUN, "/no/such/folder", True),
            (RUN, "s3://bucket/runs", False),
        ],
    )
    def test_which_run_a_flow_means(self, runs: Runs, source: str, root: str, meant: bool) -> None:
        shutil.copytree(runs.path("policies", run=RUN), runs.root.parent / "copy" / RUN)
        store = ArtifactStore(str(runs.root), RUN)
        assert means_run(store, source.format(root=runs.root), root.format(root=runs.root)) is meant


def asked_of(runs: Runs) -> dict[str, Any]:
    return EvaluateRequest(run=RUN, root=str(runs.root)).model_dump(mode="json")


def schedule(name: str, *, active: bool, parameters: dict[str, Any] | None = None) -> None:
    """Give a deployment one schedule."""
    identity = on_the_server(RUN)[name].id
    made = DeploymentScheduleCreate(
        schedule=IntervalSchedule(interval=timedelta(days=30)), active=active, parameters=parameters or {}
    )

    async def put() -> None:
        async with get_client() as client:
            for each in await client.read_deployment_schedules(identity):
                await client.delete_deployment_schedule(identity, each.id)
            await client.create_deployment_schedules(identity, [made])

    asyncio.run(put())


class TestRefused:
    @pytest.mark.parametrize(
        ("requested", "place", "value"),
        [
            ({}, "grpo prune", "no rule"),
            ({"policies_every": 0}, "--policies-every", 0),
            ({"policies_last": 0}, "--policies-last", 0),
            ({"images_older_than": "a month"}, "--images-older-than", "a month"),
            ({"images_older_than": "-3d"}, "--images-older-than", "-3d"),
            ({"previous_older_than": "3i"}, "--previous-older-than", "3i"),
            ({"evaluations": True, "policies_last": 1}, "--evaluations", True),
            ({"sources": (RUN, RUN), "policies_last": 1}, "RUN", [RUN, RUN]),
            ({"sources": ("prune",), "policies_last": 1}, "RUN", "prune"),
        ],
    )
    def test_with_place_and_value(
        self, trained: tuple[Runs, Start], requested: dict[str, Any], place: str, value: object
    ) -> None:
        before = tree(trained[0].root)
        assert refused(root=str(trained[0].root), **requested) == [(place, value)]
        assert tree(trained[0].root) == before

    def test_by_the_program_with_exit_code_2(self, trained: tuple[Runs, Start]) -> None:
        result = CliRunner().invoke(application, ["prune", RUN, "--root", str(trained[0].root)])
        assert (result.exit_code, result.stderr[:6]) == (2, "error:")

    @pytest.mark.parametrize("place", ["", "rescored/mix"])
    def test_while_somebody_writes(self, runs: Runs, place: str) -> None:
        before = contents(runs.root)
        with locked(ArtifactStore(str(runs.root), RUN), place, setting="run.name", value=RUN):
            assert refused(root=str(runs.root), policies_last=1) == [("RUN", f"{RUN}/{place}".rstrip("/"))]
            assert deleted(pruned(runs, policies_last=1, dry_run=True))
        assert contents(runs.root) == before


def test_rules_have_defaults() -> None:
    assert PruneRequest(("a",), policies_every=5).last == 2
    assert PruneRequest(("a",), policies_last=7).last == 7
    assert PruneRequest(("a",), images_older_than="3d").last is None


def test_a_flow_of_each_kind_is_known() -> None:
    from flows.evaluation.evaluate import evaluate
    from flows.rescoring.rescore import rescore as rescore_flow
    from flows.training.train import train

    assert {train.name, evaluate.name, rescore_flow.name} == {TRAIN, EVALUATE, RESCORE}
    assert ScheduledFlow("x", TRAIN, {}).flow == TRAIN
