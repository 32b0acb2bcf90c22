"""Readers of a pruned run, and damage in it: it continues where what was deleted is described, and names the rest."""

import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.evaluation import plan_evaluate
from flows.inspect_run import inspect_run
from flows.pipeline.requests import EvaluateRequest
from flows.pruning.plan import IMAGES, VERSIONS
from flows.rewards.analyse import analyse_rewards
from grpo_core.errors import InputError
from tests.flows.conftest import Runs, Start, flip, refused
from tests.flows.pruning.conftest import RUN, again, deleted, iteration, kept, pruned
from tests.flows.rescoring.test_rescore import PSNR, SSIM, scored_again

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


def test_prune_passes_by_damaged_rollouts(runs: Runs) -> None:
    part = runs.path(iteration(1), "rollouts", "part-00000.parquet", run=RUN)
    flip(part, random.Random(3))
    left = part.read_bytes()
    planned = pruned(runs, dry_run=True, **PRUNES)
    done = pruned(runs, **PRUNES)
    assert deleted(done)[VERSIONS] == deleted(planned)[VERSIONS]
    assert (deleted(done)[IMAGES], deleted(planned)[IMAGES]) == (2, 3)
    (note,) = [each for each in done.runs[0].notes if "damaged" in each]
    assert f"{RUN}/{iteration(1)}/rollouts" in note
    assert kept(done, IMAGES) == kept(planned, IMAGES)
    # Only the next start moves it.
    assert not runs.path("quarantine", run=RUN).exists()
    assert part.read_bytes() == left


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

    def test_the_analysis_scores_nothing_again(self, gone: Runs) -> None:
        summary = analyse_rewards(RUN, root=str(gone.root))
        assert set(summary.not_repeated) == {"ssim", "psnr"}
        assert [reward["noise"] for reward in summary.analysis["rewards"]] == [None, None]

    def test_rescoring_needs_images_for_scores_that_are_not_stored(self, gone: Runs) -> None:
        (error,) = refused(lambda: scored_again(gone, SSIM, {"reward": "jpeg"}, sources=(RUN,)))
        assert (error.place, error.value) == ("rewards.1.jpeg", "jpeg")
        summary, _ = scored_again(gone, {**SSIM, "weight": 0.1}, PSNR, sources=(RUN,))
        assert summary.computed == {"ssim": 0, "psnr": 0}
