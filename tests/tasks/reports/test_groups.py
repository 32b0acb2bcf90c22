import hashlib
from pathlib import Path

import pytest

from tasks.reports.groups import LARGE, Group, Groups, read_groups
from tasks.reports.images import PromptImages
from tasks.runs.layout import source_file
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tests.tasks.reports.made_runs import RunMaker, colour, completion, flip_last_byte, png, whole_run


def read(maker: RunMaker, targets: PromptImages | None = None, limit: int = 10) -> Groups:
    reader = RunReader(maker.store)
    shown = read_run(reader).shown
    assert shown is not None
    return read_groups(reader, shown.stages, maker.folder, targets or PromptImages(LARGE), limit=limit)


def test_groups_have_the_images_of_their_prompts_once_read(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    kept, lost = png((9, 8, 7)), png((1, 1, 1), side=900)
    maker.sources = {0: [lost, kept], 1: [kept]}
    maker.iteration(1)
    images_of = PromptImages(LARGE, maker.store)
    first, second = read(maker, images_of).shown
    assert [[each.size for each in group.sources] for group in (first, second)] == [[(320, 320), (8, 8)], [(8, 8)]]
    assert second.sources[0].getpixel((0, 0)) == (9, 8, 7)
    digest = hashlib.sha256(lost).hexdigest()
    flip_last_byte(maker.folder / source_file(digest))
    images_of = PromptImages(LARGE, maker.store)
    first, _ = read(maker, images_of).shown
    assert [each.size for each in first.sources] == [(8, 8)]
    assert list(images_of.missing_sources) == [digest]


def sizes(group: Group) -> list[tuple[int, int]]:
    return [row["output"].size for row in group.samples]


def test_best_and_worst_with_their_rewards(tmp_path: Path) -> None:
    group, same = read(whole_run(tmp_path, labels=("ssim", "psnr"))).shown
    assert group.best is not None
    assert group.worst is not None
    # Rewards 0.4, 0.1, 0.9 and none, all 0.1 higher in the second iteration.
    assert [sample["sample_id"][-3:] for sample in group.samples] == ["s02", "s00", "s01", "s03"]
    assert group.best["reward"] == pytest.approx(1.0)
    assert group.best["advantage"] == pytest.approx(1.0)
    assert group.best["breakdown"] == {"ssim": pytest.approx(1.0), "psnr": pytest.approx(1.0)}
    assert group.worst["reward"] == pytest.approx(0.2)
    assert group.samples[-1]["reward"] is None
    assert group.samples[-1]["breakdown"] == {"ssim": None, "psnr": None}
    assert group.spread == pytest.approx(0.8)
    assert group.reward == pytest.approx((0.5 + 0.2 + 1.0) / 3)
    assert group.best["length"] == 2
    # The masked token's -8 does not count.
    assert [each[:2] for each in group.best["actions"]] == [("log-prob", "-0.8 over 2 tokens")]
    assert group.best["advantages"] == {"advantage": pytest.approx(1.0)}
    assert group.best["output"].getpixel((0, 0)) == colour(0, 2)
    assert same.spread == 0


def test_images_without_rewards_are_shown_in_their_order(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    maker.rollouts("iteration_000001", "i000001")
    group = read(maker).shown[0]
    assert (group.best, group.worst, group.reward, group.spread) == (None, None, None, None)
    assert [sample["sample_id"][-3:] for sample in group.samples] == ["s00", "s01", "s02", "s03"]


def test_large_images_are_made_smaller_and_small_ones_left_alone(tmp_path: Path) -> None:
    group = read(whole_run(tmp_path, side=400)).shown[0]
    assert sizes(group) == [(320, 320), (96, 96), (320, 320), (96, 96)]
    assert sizes(read(whole_run(tmp_path / "b")).shown[0]) == [(8, 8)] * 4


def test_best_and_worst_texts_are_complete(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, modality="text")
    maker.written[0, 2] = "the best\n" + "word " * 5000
    maker.iteration(1)
    group, _ = read(maker).shown
    assert group.best is not None
    assert group.worst is not None
    assert group.best["output"] == maker.written[0, 2]
    assert group.worst["output"] == completion(0, 1)
    assert (group.best["finished"], group.worst["finished"]) == (True, False)
    assert group.target is None


def test_the_groups_of_all_rounds_and_which_were_dropped(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, datasets=("sums", "poems"))
    maker.iteration(1, rounds=2)
    groups = read(maker)
    assert [tuple(group.samples[0][name] for name in ("group_id", "dataset", "dropped")) for group in groups.shown] == [
        ("i000001.p0000", "sums", False),
        ("i000001.p0001", "poems", True),
        ("i000001.d02.p0000", "sums", False),
        ("i000001.d02.p0001", "poems", True),
    ]
    assert (groups.total, groups.rounds, groups.dropped, groups.varying) == (4, 2, 2, ["dataset"])
    # Scores of a later draw stand in that draw's own folder.
    assert [group.samples[0]["breakdown"]["ssim"] for group in groups.shown] == [0.9, 0.5, 0.9, 0.5]
    assert groups.shown[1].samples[0]["advantage"] is None
    limited = read(maker, limit=1)
    assert (len(limited.shown), limited.total, limited.dropped) == (1, 4, 2)


def test_further_images_stand_beside_their_token_sample_and_are_not_ranked(tmp_path: Path) -> None:
    """With both streams the reward of a second image can be of other rewards than those of the token samples."""
    maker = RunMaker(tmp_path, streams=("tokens", "denoising"))
    maker.iteration(1)
    groups = read(maker)
    group = groups.shown[0]
    assert [sample["sample_id"][-3:] for sample in group.samples] == ["s02", "s00", "s03", "s01"]
    assert [sample["reward"] for sample in group.samples] == pytest.approx([0.9, 0.4, 0.8, 0.1])
    assert group.best is not None
    assert group.worst is not None
    assert (group.best["sample_id"][-3:], group.worst["sample_id"][-3:]) == ("s02", "s01")
    assert group.reward == pytest.approx((0.4 + 0.1 + 0.9) / 3)
    assert groups.has_further_images
    assert [dict(sample["advantages"]) for sample in group.samples] == [
        {"advantage, tokens": pytest.approx(0.8)},
        {"advantage, tokens": pytest.approx(-0.2), "advantage, denoising": pytest.approx(-0.6)},
        {"advantage, denoising": pytest.approx(0.6)},
        {"advantage, tokens": pytest.approx(-0.8)},
    ]
    assert [(each.title, each.value) for each in group.samples[1]["actions"]] == [
        ("log-prob", "-0.8 over 2 tokens"),
        ("log-prob, steps 2 to 3", "1.2500, -0.5000"),
    ]


def test_images_without_tokens(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, streams=("denoising",))
    maker.iteration(1)
    groups = read(maker)
    best = groups.shown[0].best
    assert best is not None
    assert (best["sample_id"][-3:], best["advantages"]) == ("s02", {"advantage": pytest.approx(0.8)})
    assert [each.title for each in best["actions"]] == ["log-prob, steps 2 to 3"]
    assert not groups.has_further_images
