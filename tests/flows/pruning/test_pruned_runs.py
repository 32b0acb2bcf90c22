"""A pruned run continues, is replayed, shares its stages and survives a killed prune as if nothing were deleted."""

import asyncio
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.evaluation import plan_evaluate
from flows.inspect_run import inspect_run
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from flows.replaying import replay
from flows.requests import EvaluateRequest, ReplayRequest
from flows.rewards.analyse import analyse_rewards
from grpo_core.errors import InputError
from tasks.runs.stored_policies import stored_versions
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import Runs, Start, flip, refused
from tests.flows.pruning.conftest import (
    EVALUATED,
    EVERYTHING,
    ITERATIONS,
    RUN,
    again,
    contents,
    deleted,
    images,
    iteration,
    pruned,
)
from tests.flows.rescoring.test_rescore import PSNR, SSIM, scored_again
from tests.servers import forget_clients, s3_server


@pytest.mark.slow
class TestSameAsUnpruned:
    def test_the_run_continues(self, runs: Runs, empty: Runs) -> None:
        pruned(runs, **EVERYTHING)
        longer = runs.start(RUN, run__iterations=ITERATIONS + 1, **EVALUATED)
        unpruned = Runs(empty.root.parent / "unpruned").start(RUN, run__iterations=ITERATIONS + 1, **EVALUATED)
        assert longer.stages[0] == "iteration 5: collect rollouts"
        assert longer.summary.policy_digest == unpruned.summary.policy_digest
        assert longer.summary.heldout_after == unpruned.summary.heldout_after

    def test_a_replay_of_it(self, runs: Runs, trained: tuple[Runs, Start]) -> None:
        pruned(runs, policies_last=1, images_older_than="0i")
        request = ReplayRequest(source=RUN, root=str(runs.root))
        assert asyncio.run(replay(request)).policy_digest == trained[1].summary.policy_digest

    def test_another_run_that_shares_its_stages(self, runs: Runs, trained: tuple[Runs, Start]) -> None:
        pruned(runs, **EVERYTHING)
        runs.start("other", run__iterations=2, **EVALUATED)
        assert stored_versions(ArtifactStore(str(runs.root), "other")) == [1, 2]
        assert [images(runs, iteration(number), "other") for number in (1, 2)] == [4, 4]
        assert runs.policy_digest(2, "other") == trained[0].policy_digest(2, RUN)


KILLED = """
import shutil, sys
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.pruning.conftest import EVERYTHING, RUN
from tests.tasks.storage.made_artifacts import kill_before_each_step

def prepare(number):
    root = Path(sys.argv[1], f"killed-{number}")
    shutil.copytree(Path(sys.argv[1], RUN), root / RUN)
    steps = [(ArtifactStore, "write_manifest"), (LocalFileSystem, "rm_file")]
    return lambda: (steps, lambda: prune(PruneRequest(sources=(RUN,), root=str(root), **EVERYTHING)))

kill_before_each_step(prepare)
"""


@pytest.mark.slow
def test_killed_at_every_step_it_finishes_when_it_is_run_again(runs: Runs) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command = [sys.executable, "-c", KILLED, str(runs.root)]
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    kills = int(ended.stdout.split()[-1]) - 1
    assert kills >= 10
    pruned(runs, **EVERYTHING)
    expected = files_of_artifacts(runs.root / RUN)
    for number in range(1, kills + 1):
        folder = runs.root / f"killed-{number}"
        store = ArtifactStore(str(folder), RUN)
        places = [path.relative_to(folder / RUN) for path in (folder / RUN).rglob("*.manifest.json")]
        found = [store.find(place.as_posix().removesuffix(".manifest.json")) for place in places]
        assert all(reference is not None for reference in found), number
        prune(PruneRequest(sources=(RUN,), root=str(folder), **EVERYTHING))
        assert files_of_artifacts(folder / RUN) == expected, number
        assert deleted(prune(PruneRequest(sources=(RUN,), root=str(folder), **EVERYTHING))) == {}


@pytest.mark.slow
def test_in_a_bucket(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lock in runs.root.rglob(".lock"):
        lock.unlink()
    with s3_server(tmp_path) as server:
        for name, value in {**server.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        forget_clients()
        bucket = server.make_bucket()
        store = ArtifactStore(f"s3://{bucket}/runs", RUN)
        store.filesystem.put(f"{runs.root}/", f"{bucket}/runs/", recursive=True)
        seen = len(server.requests())
        planned = prune(PruneRequest(sources=(RUN,), root=f"s3://{bucket}/runs", dry_run=True, **EVERYTHING))
        assert {request.split()[0] for request in server.requests(seen)} <= {"GET", "HEAD"}
        there = prune(PruneRequest(sources=(RUN,), root=f"s3://{bucket}/runs", **EVERYTHING))
        here = pruned(runs, **EVERYTHING)
        for summary in (planned, there):
            assert (deleted(summary), summary.runs[0].kept) == (deleted(here), here.runs[0].kept)
        assert stored_versions(store) == stored_versions(ArtifactStore(str(runs.root), RUN))
        for path in runs.root.rglob("*.parquet"):
            assert store.filesystem.cat_file(f"{bucket}/runs/{path.relative_to(runs.root)}") == path.read_bytes()
        assert deleted(prune(PruneRequest(sources=(RUN,), root=f"s3://{bucket}/runs", **EVERYTHING))) == {}
    forget_clients()


def files_of_artifacts(run: Path) -> dict[str, str]:
    """Every file except manifests."""
    return {name: sha for name, sha in contents(run).items() if not name.endswith(".manifest.json")}


PRUNES = {"policies_last": 1, "images_older_than": "1i"}


@pytest.mark.slow
def test_damaged_scores_of_removed_images_are_an_error_until_they_are_put_back(
    runs: Runs, trained: tuple[Runs, Start]
) -> None:
    pruned(runs, **PRUNES)
    table = f"{iteration(2)}/rewards/ssim"
    (scores,) = runs.path(table, run=RUN).iterdir()
    flip(scores, random.Random(1))
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            again(runs)
    (quarantined,) = runs.path("quarantine", run=RUN).iterdir()
    assert (caught.value.place, caught.value.value) == (f"{RUN}/{table}", "damaged")
    assert str(quarantined) in caught.value.hint
    # Putting back the files of a copy repairs the run.
    for name in (table, f"{table}.manifest.json"):
        source, target = trained[0].path(name, run=RUN), runs.path(name, run=RUN)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    start = again(runs)
    assert (start.stages, start.summary.policy_digest) == ((), trained[1].summary.policy_digest)


def test_an_evaluation_of_another_version_of_that_number_is_not_taken(runs: Runs) -> None:
    root = str(runs.root)
    assert plan_evaluate(EvaluateRequest(run=f"{RUN}@4", root=root)).stored is not None
    place = runs.path("evaluations", run=RUN)
    shutil.rmtree(place / "000004")
    for path in place.glob("000004.*"):
        path.unlink()
    shutil.copytree(place / "000002", place / "000004")
    assert plan_evaluate(EvaluateRequest(run=f"{RUN}@2", root=root)).stored is not None
    assert plan_evaluate(EvaluateRequest(run=f"{RUN}@4", root=root)).stored is None


def test_readers_of_what_has_no_images_any_more(runs: Runs, tmp_path: Path) -> None:
    pruned(runs, policies_every=2, images_older_than="0i")
    root, page = str(runs.root), tmp_path / "page.html"
    inspection = inspect_run(RUN, root=root, iteration=2, html=page)
    (warning,) = inspection.warnings
    assert warning.startswith("iteration 2: ")
    assert page.read_text().count("image removed") >= 2
    assert CliRunner().invoke(application, ["inspect", RUN, "--iteration", "2", "--root", root]).exit_code == 0
    summary = analyse_rewards(RUN, root=root)
    assert set(summary.not_repeated) == {"ssim", "psnr"}
    (error,) = refused(lambda: scored_again(runs, SSIM, {"reward": "jpeg"}, sources=(RUN,)))
    assert (error.place, error.value) == ("rewards.1.jpeg", "jpeg")
    again_scored, _ = scored_again(runs, {**SSIM, "weight": 0.1}, PSNR, sources=(RUN,))
    assert again_scored.computed == {"ssim": 0, "psnr": 0}
