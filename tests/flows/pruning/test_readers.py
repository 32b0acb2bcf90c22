"""Readers of a pruned run, what schedules keep, and prunes that are refused."""

import asyncio
import shutil
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
from flows.evaluation.evaluate import evaluate
from flows.inspection.inspect_run import inspect_run
from flows.pipeline.requests import EvaluateRequest
from flows.pruning.needs import EVALUATE, RESCORE, TRAIN, means_run
from flows.pruning.plan import IMAGES, VERSIONS
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from flows.rescoring.rescore import rescore
from flows.rewards.analysis import analyse_rewards
from flows.training.train import train
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.run_lock import locked
from tests.flows.conftest import Runs, Start, refused
from tests.flows.deployment.deployed import deployed, make_pool, on_the_server
from tests.flows.pruning.conftest import EVALUATED, RUN, again, contents, deleted, kept, pruned, tree
from tests.flows.rescoring.test_rescore import PSNR, SSIM, scored_again


class TestReaders:
    @pytest.fixture
    def gone(self, runs: Runs) -> Runs:
        pruned(runs, policies_every=2, images_older_than="0i")
        return runs

    def test_an_iteration_without_images_is_shown(self, gone: Runs, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        inspection = inspect_run(RUN, root=str(gone.root), iteration=2, html=page)
        (warning,) = inspection.warnings
        assert warning.startswith("iteration 2: ")
        assert page.read_text().count("image removed") >= 2
        assert inspection.run.finished
        shown = CliRunner().invoke(application, ["inspect", RUN, "--iteration", "2", "--root", str(gone.root)])
        assert shown.exit_code == 0

    def test_the_last_iteration_is_reported_again(self, gone: Runs, trained: tuple[Runs, Start]) -> None:
        start = again(gone)
        assert (start.stages, start.summary.policy_digest) == ((), trained[1].summary.policy_digest)

    def test_the_analysis_scores_nothing_again(self, gone: Runs) -> None:
        summary = analyse_rewards(RUN, root=str(gone.root))
        assert set(summary.not_repeated) == {"ssim", "psnr"}
        assert [reward["noise"] for reward in summary.analysis["rewards"]] == [None, None]

    def test_rescoring_needs_images_for_scores_that_are_not_stored(self, gone: Runs) -> None:
        (error,) = refused(lambda: scored_again(gone, SSIM, {"reward": "jpeg"}, sources=(RUN,)))
        assert (error.place, error.value) == ("rewards.1.jpeg", "jpeg")
        summary, _ = scored_again(gone, {**SSIM, "weight": 0.1}, PSNR, sources=(RUN,))
        assert summary.computed == {"ssim": 0, "psnr": 0}


class TestScheduled:
    def test_what_an_active_schedule_needs(self, runs: Runs) -> None:
        make_pool()
        file = runs.root.parent / "nightly.yaml"
        file.write_text(yaml.safe_dump({"rewards": [SSIM]}))
        overrides = [each for each in runs.overrides(**EVALUATED) if not each.startswith("run.name")]
        changed = [*overrides, "run.iterations=9", "evaluate.every=3"]
        deployed(run=RUN, cron="0 2 * * *", evaluate=True, rescore=(str(file),), overrides=changed)
        requested = {"policies_last": 1, "images_older_than": "0i", "dry_run": True}
        # The training alone has a schedule, and would evaluate version 3 on its way.
        summary = pruned(runs, **requested)
        assert "grpo train/pruned" in kept(summary, VERSIONS)["3"]
        assert "1" not in kept(summary, VERSIONS)
        assert deleted(summary)[IMAGES] == 4
        schedule(f"{RESCORE}/pruned-rescore-nightly", active=True)
        request = EvaluateRequest(run=RUN, root=str(runs.root), policy=1)
        schedule(f"{EVALUATE}/pruned-evaluate", active=True, parameters={"request": request.model_dump(mode="json")})
        summary = pruned(runs, **requested)
        assert summary.schedules
        assert "grpo evaluate/pruned-evaluate" in kept(summary, VERSIONS)["1"]
        assert IMAGES not in deleted(summary)
        assert all("grpo rescore/pruned-rescore-nightly" in reason for reason in kept(summary, IMAGES).values())
        for name in (f"{RESCORE}/pruned-rescore-nightly", f"{EVALUATE}/pruned-evaluate"):
            schedule(name, active=False)
        assert deleted(pruned(runs, **requested))[IMAGES] == 4

    def test_a_server_that_does_not_answer(self, runs: Runs) -> None:
        before = tree(runs.root)
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            assert problems(root=str(runs.root), policies_last=1) == [("PREFECT_API_URL", "http://127.0.0.1:9/api")]
        assert tree(runs.root) == before
        with temporary_settings({PREFECT_API_URL: None}):
            assert not pruned(runs, policies_last=1, dry_run=True).schedules

    def test_which_run_a_flow_means(self, runs: Runs) -> None:
        root, copy = str(runs.root), runs.root.parent / "copy"
        shutil.copytree(runs.path("policies", run=RUN), copy / RUN)
        cases: dict[tuple[str, str], bool] = {
            (RUN, root): True,
            (f"{root}/{RUN}", "elsewhere"): True,
            ("other", root): False,
            (RUN, f"{root}/../copy"): False,
            # A missing folder may be another machine's path to the same disk.
            (RUN, "/no/such/folder"): True,
            (RUN, "s3://bucket/runs"): False,
        }
        store = ArtifactStore(root, RUN)
        assert {case: means_run(store, *case) for case in cases} == cases


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


def problems(**requested: Any) -> list[tuple[str, object]]:
    errors = refused(lambda: prune(PruneRequest(**{"sources": (RUN,), **requested})))
    return [(error.place, error.value) for error in errors]


WRONG: list[tuple[dict[str, Any], str, object]] = [
    ({}, "grpo prune", "no rule"),
    ({"policies_every": 0}, "--policies-every", 0),
    ({"policies_last": 0}, "--policies-last", 0),
    ({"images_older_than": "a month"}, "--images-older-than", "a month"),
    ({"images_older_than": "-3d"}, "--images-older-than", "-3d"),
    ({"previous_older_than": "3i"}, "--previous-older-than", "3i"),
    ({"evaluations": True, "policies_last": 1}, "--evaluations", True),
    ({"sources": (RUN, RUN), "policies_last": 1}, "RUN", [RUN, RUN]),
    ({"sources": ("prune",), "policies_last": 1}, "RUN", "prune"),
]


class TestRefused:
    def test_with_place_and_value(self, trained: tuple[Runs, Start]) -> None:
        root = trained[0].root
        before = tree(root)
        for requested, place, value in WRONG:
            assert problems(root=str(root), **requested) == [(place, value)]
        assert tree(root) == before

    @pytest.mark.parametrize("place", ["", "rescored/mix"])
    def test_while_another_process_writes(self, runs: Runs, place: str) -> None:
        before = contents(runs.root)
        with locked(ArtifactStore(str(runs.root), RUN), place, setting="run.name", value=RUN):
            assert problems(root=str(runs.root), policies_last=1) == [("RUN", f"{RUN}/{place}".rstrip("/"))]
            assert deleted(pruned(runs, policies_last=1, dry_run=True))
        assert contents(runs.root) == before


def test_rules_have_defaults() -> None:
    assert PruneRequest(sources=("a",), policies_every=5).last == 2
    assert PruneRequest(sources=("a",), policies_last=7).last == 7
    assert PruneRequest(sources=("a",), images_older_than="3d").last is None


def test_the_names_of_scheduled_flows() -> None:
    assert (train.name, evaluate.name, rescore.name) == (TRAIN, EVALUATE, RESCORE)
