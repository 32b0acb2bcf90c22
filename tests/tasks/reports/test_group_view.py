from pathlib import Path

import pytest
from PIL import Image

from tasks.reports import group_view
from tasks.reports.artifact_reader import ArtifactReader
from tasks.reports.group_view import Groups, TargetReader, read_groups
from tasks.reports.run_view import read_run
from tests.tasks.reports.made_runs import RunMaker, colour, png, whole_run


def read(maker: RunMaker, targets: TargetReader | None = None, limit: int = 10) -> Groups:
    reader = ArtifactReader(maker.store)
    shown = read_run(reader).shown
    assert shown is not None
    return read_groups(reader, shown.stages, maker.folder, targets or TargetReader(), limit=limit)


def test_best_and_worst_with_what_was_thought_of_them(tmp_path: Path) -> None:
    group, same = read(whole_run(tmp_path)).shown
    assert group.best is not None
    assert group.worst is not None
    # Rewards 0.4, 0.1, 0.9 and none, all 0.1 higher in the second iteration.
    assert [sample.sample_id[-3:] for sample in group.samples] == ["s02", "s00", "s01", "s03"]
    assert group.best.reward == pytest.approx(1.0)
    assert group.best.advantage == pytest.approx(1.0)
    assert group.best.breakdown == {"ssim": pytest.approx(1.0)}
    assert group.worst.reward == pytest.approx(0.2)
    assert group.samples[-1].reward is None
    assert group.samples[-1].breakdown == {"ssim": None}
    assert group.spread == pytest.approx(0.8)
    assert group.reward == pytest.approx((0.5 + 0.2 + 1.0) / 3)
    assert (group.best.logprob, group.best.length) == (-0.75, 2)  # the masked token's -8 does not count
    assert group.best.image.getpixel((0, 0)) == colour(0, 2)
    assert same.spread == 0


def test_pictures_without_rewards_are_shown_as_drawn(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    maker.rollouts("iteration_000001", "i000001")
    group = read(maker).shown[0]
    assert (group.best, group.worst, group.reward, group.spread) == (None, None, None, None)
    assert [sample.sample_id[-3:] for sample in group.samples] == ["s00", "s01", "s02", "s03"]


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    groups = read(whole_run(tmp_path), limit=1)
    assert (len(groups.shown), groups.total) == (1, 2)


def test_large_pictures_are_made_smaller_and_small_ones_left_alone(tmp_path: Path) -> None:
    group = read(whole_run(tmp_path, side=400)).shown[0]
    assert [sample.image.size for sample in group.samples] == [(320, 320), (96, 96), (320, 320), (96, 96)]
    assert {sample.image.size for sample in read(whole_run(tmp_path / "b")).shown[0].samples} == {(8, 8)}


def test_targets_are_verified(tmp_path: Path) -> None:
    target, gone, changed = (tmp_path / name for name in ("target.png", "gone.png", "changed.png"))
    for path in (target, gone, changed):
        path.write_bytes(png((1, 2, 3)))
    maker = RunMaker(tmp_path / "runs", prompts=("one", "two", "three", "four"))
    maker.targets = {0: target, 1: gone, 2: changed}
    maker.rollouts("iteration_000001", "i000001")
    gone.unlink()
    changed.write_bytes(png((9, 9, 9)))
    targets = TargetReader()
    found = [group.target for group in read(maker, targets).shown]
    assert found[0] is not None
    assert found[0].getpixel((0, 0)) == (1, 2, 3)
    assert found[1:] == [None, None, None]
    assert set(targets.missing) == {str(gone), str(changed)}


def test_a_transparent_target_lies_over_white() -> None:
    half = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert group_view._over_white(half).getpixel((0, 0)) == (255, 255, 255)
