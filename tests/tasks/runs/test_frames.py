"""Frames of made runs: which rows are read, what they are joined with, and that damage is an error."""

from collections.abc import Callable
from pathlib import Path

import fsspec
import polars as pl
import pytest

from grpo_core.errors import InputError
from tasks.runs.frames import StoredRun, open_run
from tests.tasks.reports.made_runs import RunMaker, colour, contents, flip_last_byte, reward_of, whole_run


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> RunMaker:
    maker = whole_run(tmp_path_factory.mktemp("root"), labels=("ssim", "psnr"))
    # Its second sampling round has its own rollouts and scores; the last advantages cover both.
    maker.iteration(3, rounds=2)
    # A running training has not written it yet.
    (maker.folder / "iteration_000003/metrics.parquet").unlink()
    return maker


@pytest.fixture(scope="module")
def run(maker: RunMaker) -> StoredRun:
    return open_run(maker.folder)


def test_metrics_have_a_row_per_iteration(run: StoredRun) -> None:
    metrics = run.metrics()
    assert metrics["iteration"].to_list() == [1, 2, 3]
    assert metrics["reward"].to_list() == pytest.approx([0.5, 0.6, 0.7])
    assert metrics["heldout_reward"].to_list() == [None, 0.75, None]


def test_rollouts_of_all_rounds_without_images(run: StoredRun) -> None:
    rollouts = run.rollouts()
    assert rollouts.group_by("iteration", maintain_order=True).len().rows() == [(1, 8), (2, 8), (3, 16)]
    assert "image" not in rollouts.columns
    chosen = run.rollouts(iterations=[3], columns=["sample_id", "image"])
    assert chosen.columns == ["sample_id", "image"]
    assert chosen["sample_id"].n_unique() == 16


def test_samples_have_their_scores_and_images(run: StoredRun) -> None:
    samples = run.samples(prompt="BLUE", iterations=range(2, 4))
    # Siblings of the second group in iteration 2, and in both rounds of iteration 3.
    assert samples["prompt"].unique().to_list() == ["a blue square"]
    assert run.samples(prompt="a .* square").is_empty()
    expected = [reward_of(1, sibling, shift) for shift in (0.1, 0.2, 0.2) for sibling in range(4)]
    for column in ("reward", "rewards/ssim", "rewards/psnr"):
        assert samples[column].to_list() == expected
    images = run.decode(samples["image"])
    assert [image and image.getpixel((0, 0)) for image in images] == [colour(1, sibling) for sibling in range(4)] * 3
    assert run.decode(pl.Series([None], dtype=samples.schema["image"])) == [None]


def test_samples_of_two_streams_have_the_advantages_of_both(tmp_path: Path) -> None:
    """Sample 3 is a second image of sample 0's tokens; an evaluation compares all in both."""
    run = open_run(whole_run(tmp_path, streams=("tokens", "denoising")).folder)
    samples = run.samples(iterations=[1])[:4]
    assert samples["sample_id"].to_list() == [f"i000001.p0000.s{sibling:02d}" for sibling in range(4)]
    assert samples["reward"].to_list() == [0.4, 0.1, 0.9, 0.8]
    assert samples["advantages/tokens"].to_list() == pytest.approx([-0.2, -0.8, 0.8, None])
    assert samples["advantages/denoising"].to_list() == pytest.approx([-0.6, None, None, 0.6])
    assert samples["advantage"].to_list() == pytest.approx([-0.2, -0.8, 0.8, 0.6])
    advantages = run.advantages(iterations=[1])
    assert advantages.group_by("stream", maintain_order=True).len().rows() == [("tokens", 6), ("denoising", 4)]
    assert run.heldout(policies=[0]).height == 8


def test_a_bucket_has_the_same_frames(run: StoredRun, maker: RunMaker) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(maker.folder), "/frames/", recursive=True)
    remote = open_run("made", root="memory://frames")
    try:
        assert remote.samples().equals(run.samples())
        assert remote.rewards(iterations=[1]).equals(run.rewards(iterations=[1]))
    finally:
        memory.rm("/frames", recursive=True)


def test_damage_is_an_error_and_nothing_is_changed(tmp_path: Path) -> None:
    damaged = whole_run(tmp_path)
    flip_last_byte(damaged.folder / "iteration_000002/rollouts/part-00000.parquet")
    before = contents(damaged.folder)
    run = open_run("made", root=str(tmp_path))
    for read in (run.rollouts, run.samples, run.metrics):
        with pytest.raises(InputError) as caught:
            read()
        assert caught.value.place == "made/iteration_000002/rollouts/part-00000.parquet"
    assert run.rollouts(iterations=[1]).height == 8
    assert contents(damaged.folder) == before


@pytest.mark.parametrize(
    ("read", "place", "value"),
    [
        (lambda run: run.rollouts(columns=["promt"]), "columns", "promt"),
        (lambda run: run.samples(iterations=[4]), "iterations of made", 4),
        (lambda run: run.heldout(policies=[1]), "held-out policies of made", 1),
    ],
)
def test_what_is_not_there_is_named(
    run: StoredRun, read: Callable[[StoredRun], object], place: str, value: object
) -> None:
    with pytest.raises(InputError) as caught:
        read(run)
    assert (caught.value.place, caught.value.value) == (place, value)
