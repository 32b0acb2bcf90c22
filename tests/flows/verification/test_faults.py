"""Planted faults under checksums made again: each is named once, at its root, with its cause; the run is untouched."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.evaluation import plan_evaluate
from flows.requests import EvaluateRequest
from tasks.runs.reader import RunReader
from tasks.runs.stored import read_iterations
from tasks.storage.artifacts.reference import MANIFEST_ENDING, PolicyRef
from tasks.storage.prefect_results import FOLDER, recorded_stage
from tests.flows.conftest import sha256_of
from tests.flows.verification import planting
from tests.flows.verification.conftest import verified
from tests.flows.verification.planting import EVALUATED, Plant
from tests.flows.verification.resealed import digest_of, opened

StoredRuns = Callable[[str], Path]
UPDATE, ADVANTAGES = "iteration {}: update policy", "iteration {}: compute advantages"
HELDOUT = "evaluation of policy 4: collect rollouts"


@pytest.fixture
def planted(stored: StoredRuns, own_files: Path, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Copies a finished run; the person's own files are restored at the end."""
    shutil.copytree(own_files, tmp_path / "own")

    def copied(name: str) -> Path:
        shutil.copytree(stored(name).parent, tmp_path / "runs")
        return tmp_path / "runs" / name

    yield copied
    shutil.copytree(tmp_path / "own", own_files, dirs_exist_ok=True)


def require_readable(run: Path) -> None:
    """Assert that reading finds nothing wrong: files, digests of values, records, iterations and the evaluation."""
    store, reader = opened(run), RunReader(opened(run))
    for manifest in sorted(run.rglob(f"*{MANIFEST_ENDING}")):
        folder = manifest.relative_to(run).as_posix().removesuffix(MANIFEST_ENDING)
        found = reader.find(folder)
        assert found is not None, reader.damages
        assert reader.verify(found, only=found.manifest.files), reader.damages
        assert found.reference.digest == digest_of(run / folder)
    for record in (run / FOLDER).glob("*.json"):
        reference = recorded_stage(store, record.stem)
        artifact = reference.checkpoint if isinstance(reference, PolicyRef) else reference
        assert artifact is not None
        assert store.find(artifact.folder) == artifact
    assert len(read_iterations(store, None, "stored")) == EVALUATED
    request = EvaluateRequest(run=f"{run.name}@{EVALUATED}", root=str(run.parent), trust_code=True)
    assert plan_evaluate(request).stored is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plant", "iterations", "following"),
    [
        ("tiny_text", planting.score_changed, "2", {ADVANTAGES.format(2)}),
        ("tiny_text", planting.advantage_changed, "3", {UPDATE.format(3)}),
        ("tiny_text", planting.token_changed, "2", {UPDATE.format(2)}),
        ("tiny_text", planting.logprob_moved, "2", set()),
        ("tiny_text", planting.row_seed_changed, "2", set()),
        ("tiny_text", planting.policy_replaced, "4", {HELDOUT}),
        ("tiny_text", planting.optimizer_replaced, "4", set()),
        ("tiny_text", planting.row_left_out, "4", {HELDOUT}),
        ("tiny_text", planting.heldout_improved, "4", set()),
        ("tiny_text", planting.seed_changed, "1", set()),
        ("tiny_text", planting.weights_swapped, "1:2", set()),
        ("tiny_text", planting.reward_edited, "1:2", set()),
        ("tiny_sd3", planting.pixel_changed, "2", {"iteration 2: score ssim"}),
        ("tiny_sd3", planting.guidance_changed, "1", set()),
        ("tiny_sd3", planting.denoising_logprob_moved, "2", {UPDATE.format(2)}),
        ("tiny_edit", planting.source_replaced, "2", {UPDATE.format(2)}),
        ("tiny_both", planting.policy_replaced, "4", {HELDOUT}),
        ("tiny_both", planting.optimizer_replaced, "4", set()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_is_named_at_its_root(
    planted: Callable[[str], Path], name: str, plant: Plant, iterations: str, following: set[str]
) -> None:
    run = planted(name)
    expected = plant(run)
    require_readable(run)
    before = sha256_of(run)
    report = verified(run.parent, name, iterations=iterations)
    assert sha256_of(run) == before
    first, *others = report.roots
    assert (first.title, first.differences[0].sample_id) == (expected.root, expected.sample_id)
    assert expected.place in first.differences[0].place
    # Of a setting or a file that decides several stages, each is named with the same cause.
    for fact in expected.cause:
        assert all(fact in str(root.cause) for root in report.roots), (fact, report.roots)
    assert not others or not following
    assert {stage.title for stage in report.stages if stage.follows is not None} == following
    assert all(stage.follows == expected.root for stage in report.stages if stage.follows is not None)
    assert report.exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plant"), [("tiny_text", planting.prompts_swapped), ("tiny_edit", planting.source_overwritten)]
)
def test_reading_names_what_no_stage_computes(planted: Callable[[str], Path], name: str, plant: Plant) -> None:
    run = planted(name)
    expected = plant(run)
    before = sha256_of(run)
    report = verified(run.parent, name, stages=None, seed=0)
    assert sha256_of(run) == before
    assert report.roots == ()
    assert all(any(fact in problem for problem in report.problems) for fact in expected.cause), report.problems
    assert report.exit_code == 1
