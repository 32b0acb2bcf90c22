"""A stored evaluation as a card has it: prompts in the order of their file, scores, and images named by their bytes."""

import hashlib
from pathlib import Path

import pytest

from tasks.runs.layout import StoredEvaluation
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.verification.measured_evaluation import MeasuredEvaluation
from tests.tasks.reports.made_runs import RunMaker, png


@pytest.fixture
def maker(tmp_path: Path) -> RunMaker:
    """A run of images whose two prompts have a target and a source each, evaluated once."""
    made = RunMaker(tmp_path / "runs")
    (tmp_path / "targets").mkdir()
    for group in (0, 1):
        made.targets[group] = tmp_path / f"targets/{group}.png"
        made.targets[group].write_bytes(png((group, 0, 7)))
        made.sources[group] = [png((0, group, 0))]
    made.evaluation(1, shift=0.0)
    return made


def measured(maker: RunMaker) -> MeasuredEvaluation:
    def found(stage: str) -> ArtifactRef:
        reference = maker.store.find(f"evaluations/000001/{stage}")
        assert reference is not None
        return reference

    done = StoredEvaluation(found("rollouts"), found("advantages"), {"ssim": found("rewards/ssim")}, {})
    return MeasuredEvaluation(maker.store, done)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_prompts_and_scores_are_those_of_the_tables(maker: RunMaker) -> None:
    found = measured(maker)
    assert found.samples == tuple(f"heldout.p000{group}.s0{sample}" for group in (0, 1) for sample in range(4))
    assert [each.prompt for each in found.prompts()] == ["a red square", "a blue square"]
    assert [each.target for each in found.prompts()] == [sha256(png((group, 0, 7))) for group in (0, 1)]
    assert [(each.label, each.role) for each in found.scores] == [("reward", "mix"), ("ssim", "reward")]
    assert found.scores[1].values == (0.4, 0.1, 0.9, None, 0.5, 0.5, 0.5, None)
    # The prompts' means are 1.4 / 3 and 0.5; Student's t with one degree of freedom.
    middle, half = (1.4 / 3 + 0.5) / 2, 12.706204736 * (0.5 - 1.4 / 3) / 2
    assert (found.scores[1].low, found.scores[1].high) == pytest.approx((middle - half, middle + half))


def test_images_are_written_under_their_digests(maker: RunMaker, tmp_path: Path) -> None:
    assert measured(maker).write_images(tmp_path / "out", ()) == ()
    expected = {png((group, 0, 7)) for group in (0, 1)} | {png((0, group, 0)) for group in (0, 1)}
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert written == {sha256(content): content for content in expected}


def test_targets_that_are_gone_or_others_are_missing(maker: RunMaker, tmp_path: Path) -> None:
    digests = [sha256(png((group, 0, 7))) for group in (0, 1)]
    maker.targets[0].unlink()
    maker.targets[1].write_bytes(png((9, 9, 9)))
    assert sorted(measured(maker).write_images(tmp_path / "out", ())) == sorted(digests)
    assert not {path.name for path in (tmp_path / "out").iterdir()} & {*digests}
