"""Runs whose prompts have images: killed, and replayed."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from flows.inspect_run import inspect_run
from grpo_core.update.optimizer import PolicyOptimizer
from tests.flows.conftest import REPOSITORY, Runs, Start, sha256_of
from tests.flows.replaying.test_replaying import run_replay
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
        "evaluate__every": 2,
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


def stored(runs: Runs, run: str = "run") -> set[str]:
    return {path.name for path in runs.path("sources", run=run).iterdir()}


def test_a_replay_reads_its_sources_from_the_run_that_has_them(
    trained: tuple[Runs, Path, Start], tmp_path: Path
) -> None:
    runs, start = trained[0].copied_to(tmp_path / "runs"), trained[2]
    assert stored(runs) == {hashlib.sha256(content).hexdigest() for content in IMAGES.values()}
    shown = inspect_run("run", root=str(runs.root))
    assert (shown.warnings, shown.summary(None).policy_digest) == ((), start.summary.policy_digest)
    before = sha256_of(runs.path())
    summary, _ = run_replay(runs, "evaluate.prompts=null")
    assert summary.policy_digest == start.summary.policy_digest
    assert sha256_of(runs.path()) == before
    assert not runs.path("sources", run="run-replay").exists()
    run_replay(runs, name="evaluated")
    assert stored(runs, "evaluated") == {hashlib.sha256(IMAGES["c.png"]).hexdigest()}
