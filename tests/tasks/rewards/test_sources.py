"""Rewards that look at the images in prompts: over stored samples, in other processes, again, and after damage."""

import hashlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from configs.placement import PlacementSection
from configs.scoring import RewardSection
from grpo_core.errors import InputError
from tasks.execution.child_process import ChildProcesses
from tasks.execution.resources import resource
from tasks.reports.reward_analysis import score_again
from tasks.rewards.score_rewards import score_reward_task
from tasks.runs.layout import SCORES_FILE, SamplingRound, source_file
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tests.tasks.reports.made_runs import GROUP_SIZE, RunMaker, flip_last_byte, png

PLACE = "iteration_000001"
FIRST, SECOND = png((30, 0, 0)), png((70, 0, 0))
SUM_OF_REDS = """
def score(completions, source_images, **columns):
    return [sum(image.getpixel((0, 0))[0] for image in images) for images in source_images]
"""
VALUES = [100.0] * GROUP_SIZE + [0.0] * GROUP_SIZE
"""The first prompt has two images, whose reds add up to this; the second has none."""


@pytest.fixture(params=["text", "image"])
def maker(tmp_path: Path, request: pytest.FixtureRequest) -> RunMaker:
    maker = RunMaker(tmp_path / "runs", modality=request.param)
    maker.sources[0] = [FIRST, SECOND]
    use_store(maker.store)
    maker.rollouts(PLACE, "i000001")
    return maker


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(SUM_OF_REDS)
    return {"function": f"{tmp_path / 'mine.py'}:score"}


def rollouts_of(store: ArtifactStore) -> ArtifactRef:
    found = store.find(f"{PLACE}/rollouts")
    assert found is not None
    return found


def score(
    store: ArtifactStore, settings: dict[str, Any], rollouts: ArtifactRef | None = None, **more: Any
) -> list[Any]:
    section = RewardSection(reward="function", name="mine", settings=settings, **more)
    use_store(store)
    made = score_reward_task.fn(
        rollouts or rollouts_of(store), section, f"{PLACE}/rewards", "iteration 1", PlacementSection(devices="cpu")
    )
    return pl.read_parquet(store.local_files(made) / SCORES_FILE)["value"].to_list()


def test_each_sample_is_scored_with_those_of_its_prompt(maker: RunMaker, settings: dict[str, Any]) -> None:
    assert score(maker.store, settings) == VALUES
    assert score(maker.store, settings, batch_size=1) == VALUES


@pytest.mark.slow
def test_they_reach_other_processes(maker: RunMaker, settings: dict[str, Any]) -> None:
    try:
        assert score(maker.store, settings, processes=2, batch_size=1) == VALUES
    finally:
        resource(ChildProcesses).close()


def test_another_run_scores_them_from_where_they_are(maker: RunMaker, settings: dict[str, Any]) -> None:
    other = ArtifactStore(maker.store.root, "other")
    assert score(other, settings, rollouts_of(maker.store)) == VALUES


def test_a_damaged_one_is_refused_by_who_looks_at_it(maker: RunMaker, settings: dict[str, Any], tmp_path: Path) -> None:
    digest = hashlib.sha256(SECOND).hexdigest()
    flip_last_byte(maker.folder / source_file(digest))
    with pytest.raises(InputError, match=r"sample i000001\.p0000\.s00") as caught:
        score(maker.store, settings)
    assert caught.value.place.endswith(source_file(digest))
    (tmp_path / "blind.py").write_text(
        "def score(prompts, completions, completion_ids, trainer_state, log_extra, "
        "log_metric, images=None):\n    return [1.0] * len(prompts)\n"
    )
    blind = {"function": f"{tmp_path / 'blind.py'}:score"}
    if maker.texts:
        # It names images, which are those in the prompts here.
        with pytest.raises(InputError, match=digest):
            score(maker.store, blind)
    maker.store.write_file(source_file(digest), SECOND)
    assert score(maker.store, settings) == VALUES


def test_an_analysis_scores_with_them_again(maker: RunMaker, settings: dict[str, Any]) -> None:
    section = RewardSection(reward="function", name="mine", settings=settings)
    again = score_again(maker.store, 1, SamplingRound(rollouts_of(maker.store), {}), [section], samples=8)
    assert again["value"].to_list() == VALUES
