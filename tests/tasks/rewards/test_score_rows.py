"""Samples are scored with the images of their prompts, here and in other processes; a damaged image is refused."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.placement import PlacementSection
from configs.scoring import RewardSection
from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward
from tasks.execution.child_process import ChildProcesses
from tasks.execution.resources import resource
from tasks.rewards.score_rewards import score_reward_task
from tasks.rewards.score_rows import score_rows
from tasks.rewards.scores import score_again
from tasks.runs.layout import SamplingRound, source_file
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tests.tasks.reports.made_runs import GROUP_SIZE, RunMaker, flip_last_byte, png
from tests.tasks.rewards.test_score_rewards import PLACE, rollouts_of, values

FIRST, SECOND = png((30, 0, 0)), png((70, 0, 0))
SUM_OF_REDS = """
def score(completions, source_images, **columns):
    return [sum(image.getpixel((0, 0))[0] for image in images) for images in source_images]
"""
VALUES = [100.0] * GROUP_SIZE + [0.0] * GROUP_SIZE
"""The first prompt has two images, whose reds add up to this; the second has none."""


@pytest.fixture(params=["text", "image"])
def sourced(tmp_path: Path, request: pytest.FixtureRequest) -> RunMaker:
    maker = RunMaker(tmp_path / "runs", modality=request.param)
    maker.sources[0] = [FIRST, SECOND]
    use_store(maker.store)
    maker.rollouts(PLACE, "i000001")
    return maker


@pytest.fixture
def reds(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(SUM_OF_REDS)
    return {"function": f"{tmp_path / 'mine.py'}:score"}


def score_red(
    store: ArtifactStore, settings: dict[str, Any], rollouts: ArtifactRef | None = None, **more: Any
) -> list[Any]:
    section = RewardSection(reward="function", name="mine", settings=settings, **more)
    use_store(store)
    rollouts = rollouts or store.find(f"{PLACE}/rollouts")
    placement = PlacementSection(devices="cpu")
    return values(store, score_reward_task.fn(rollouts, section, f"{PLACE}/rewards", "iteration 1", placement))


def test_each_sample_is_scored_with_the_images_of_its_prompt(sourced: RunMaker, reds: dict[str, Any]) -> None:
    assert score_red(sourced.store, reds) == VALUES
    assert score_red(sourced.store, reds, batch_size=1) == VALUES
    section = RewardSection(reward="function", name="mine", settings=reds)
    again = score_again(sourced.store, 1, SamplingRound(rollouts_of(sourced), {}), [section], samples=8)
    assert again["value"].to_list() == VALUES
    # Another run scores them from where they are.
    other = ArtifactStore(sourced.store.root, "other")
    assert score_red(other, reds, rollouts_of(sourced)) == VALUES


@pytest.mark.slow
def test_images_of_prompts_reach_other_processes(sourced: RunMaker, reds: dict[str, Any]) -> None:
    try:
        assert score_red(sourced.store, reds, processes=2, batch_size=1) == VALUES
    finally:
        resource(ChildProcesses).close()


def test_a_damaged_image_is_refused_by_who_looks_at_it(sourced: RunMaker, reds: dict[str, Any], tmp_path: Path) -> None:
    digest = hashlib.sha256(SECOND).hexdigest()
    flip_last_byte(sourced.folder / source_file(digest))
    with pytest.raises(InputError, match=r"sample i000001\.p0000\.s00") as caught:
        score_red(sourced.store, reds)
    assert caught.value.place.endswith(source_file(digest))
    (tmp_path / "blind.py").write_text("def score(prompts, completions, images=None):\n    return [1] * len(prompts)\n")
    if sourced.texts:
        # It names images, which are those in the prompts here.
        with pytest.raises(InputError, match=digest):
            score_red(sourced.store, {"function": f"{tmp_path / 'blind.py'}:score"})


def test_a_network_that_has_no_room_on_its_gpu_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    reward, section = build_reward("answer", {}), RewardSection(reward="answer")
    row = {"sample_id": "s", "group_id": "g", "dataset": "d", "columns": "{}", "prompt": "p", "completion": "c"}

    def fails(error: Exception) -> None:
        def score(self: Any, batch: Any) -> Any:
            raise error

        monkeypatch.setattr(type(reward), "score", score)
        score_rows(reward, section, [row])

    with pytest.raises(InputError, match=r"too small for this reward \(CUDA out of memory\).*batch_size") as caught:
        fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert (caught.value.place, caught.value.value) == ("rewards.answer", 1)
    with pytest.raises(RuntimeError, match="size mismatch"):
        fails(RuntimeError("size mismatch"))
