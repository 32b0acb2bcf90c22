"""Runs whose prompts have images: scored and inspected, killed, and replayed."""

import hashlib
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from flows.inspect_run import inspect_run
from grpo_core.update.optimizer import PolicyOptimizer
from tests.flows.conftest import REPOSITORY, Runs, Start, sha256_of
from tests.flows.replaying.replays import run_replay
from tests.tasks.reports.made_runs import png

GROUNDING = REPOSITORY / "configs" / "tiny_grounding.yaml"
IMAGES = {f"{name}.png": png((30 * number + 20, 0, 0)) for number, name in enumerate("abc")}
PROMPTS = [
    {"prompt": "where is the red circle?", "image": "a.png"},
    {"prompt": "where is the blue square? <image> <image>", "images": ["b.png", "a.png"]},
    {"prompt": "where is the green circle?"},
]
HELDOUT = [{"prompt": "where is the blue circle?", "image": "c.png"}]
REWARD = """
def reds(completions, source_images, **columns):
    return [sum(image.getpixel((0, 0))[0] for image in images) / 255 + len(text) / 50
            for text, images in zip(completions, source_images)]
"""


def write_inputs(folder: Path) -> Path:
    """Two prompt files with their images, and the reward."""
    for name, content in IMAGES.items():
        (folder / name).write_bytes(content)
    for name, rows in (("train", PROMPTS), ("heldout", HELDOUT)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "mine.py").write_text(REWARD)
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "data__prompts": str(folder / "train.jsonl"),
        "evaluate__prompts": str(folder / "heldout.jsonl"),
        "evaluate__every": 1,
        "evaluate__samples_per_prompt": 2,
        "rewards": [{"reward": "function", "name": "reds", "settings": {"function": f"{folder / 'mine.py'}:reds"}}],
        "rollout__prompts_per_iteration": 3,
        "rollout__group_size": 2,
        "update__minibatch_size": 6,
        "update__micro_batch_size": 6,
        "run__iterations": 2,
        **changes,
    }


@pytest.fixture(scope="module")
def trained(server: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Path, Start]:
    """A finished run that no test changes, and the folder of its inputs."""
    runs, inputs = Runs(tmp_path_factory.mktemp("runs")), write_inputs(tmp_path_factory.mktemp("inputs"))
    return runs, inputs, runs.start_text("run", file=GROUNDING, **settings(inputs))


@pytest.fixture
def finished(trained: tuple[Runs, Path, Start], tmp_path: Path) -> tuple[Runs, Path, Start]:
    """A copy of it, and of its inputs."""
    runs, inputs, start = trained
    return runs.copied_to(tmp_path / "runs"), inputs, start


def stored(runs: Runs, run: str = "run") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in runs.path("sources", run=run).iterdir()}


EXPECTED = {hashlib.sha256(content).hexdigest(): content for content in IMAGES.values()}
RED = {hashlib.sha256(content).hexdigest(): 30 * number + 20 for number, content in enumerate(IMAGES.values())}


def test_each_image_is_stored_once_and_scored_with_its_prompt(trained: tuple[Runs, Path, Start]) -> None:
    runs, _, start = trained
    assert stored(runs) == EXPECTED
    for iteration in ("iteration_000001", "iteration_000002", "evaluations/000002"):
        rollouts = pl.read_parquet(runs.path(iteration, "rollouts", "part-00000.parquet"))
        scores = pl.read_parquet(runs.path(iteration, "rewards", "reds", "scores.parquet"))
        for row in rollouts.join(scores, on="sample_id").iter_rows(named=True):
            reds = sum(RED[digest] for digest in row["sources"])
            assert row["value"] == pytest.approx(reds / 255 + len(row["completion"]) / 50)
    shown = inspect_run("run", root=str(runs.root))
    assert shown.summary(None).policy_digest == start.summary.policy_digest
    assert shown.warnings == ()
    with_images = [group for group in shown.samples.groups.shown if group.sources]
    assert sorted(len(group.sources) for group in with_images) == [1, 2]


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(
    trained: tuple[Runs, Path, Start], empty: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, inputs, start = trained
    real = PolicyOptimizer.step

    def step_and_fail(self: PolicyOptimizer) -> None:
        real(self)
        if self.steps == 2:
            raise RuntimeError("power cut")

    monkeypatch.setattr(PolicyOptimizer, "step", step_and_fail)
    with pytest.raises(RuntimeError, match="power cut"):
        empty.start_text("run", file=GROUNDING, **settings(inputs))
    monkeypatch.undo()
    again = empty.start_text("run", file=GROUNDING, **settings(inputs))
    assert again.summary.policy_digest == start.summary.policy_digest
    assert empty.tables() == runs.tables()


@pytest.mark.slow
def test_a_replay_reads_its_sources_from_the_run_that_has_them(finished: tuple[Runs, Path, Start]) -> None:
    runs, _, start = finished
    before = sha256_of(runs.path())
    summary, _ = run_replay(runs, "evaluate.prompts=null")
    assert summary.policy_digest == start.summary.policy_digest
    assert sha256_of(runs.path()) == before
    assert not runs.path("sources", run="run-replay").exists()
    summary, _ = run_replay(runs, name="evaluated")
    assert set(stored(runs, "evaluated")) == {hashlib.sha256(IMAGES["c.png"]).hexdigest()}
