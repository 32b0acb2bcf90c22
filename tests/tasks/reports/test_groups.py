import base64
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from tasks.reports.groups import LARGE, Group, Groups, read_groups
from tasks.reports.images import PromptImages, fitted, image_uri, read_images, shrunk
from tasks.runs.layout import source_file
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.reports.made_runs import RunMaker, colour, completion, flip_last_byte, png, whole_run


def read(maker: RunMaker, targets: PromptImages | None = None, limit: int = 10) -> Groups:
    reader = RunReader(maker.store)
    shown = read_run(reader).shown
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


def test_what_was_recorded_is_read_of_shown_samples_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, made, real = whole_run(tmp_path), list[object](), pl.DataFrame.iter_rows

    def noted(frame: pl.DataFrame, **options: bool) -> Iterator[Any]:
        for row in real(frame, **options):
            made.extend(each for value in row.values() if isinstance(value, list) for each in value)
            yield row

    monkeypatch.setattr(pl.DataFrame, "iter_rows", noted)
    (group,) = read(maker, limit=1).shown
    # Of four samples three log-probs and as many entries of the mask each.
    assert [each[0].title for each in (row["actions"] for row in group.samples)] == ["log-prob"] * 4
    assert len([each for each in made if isinstance(each, float | bool)]) == 4 * 3 * 2


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


def plain(rgb: tuple[int, int, int], width: int = 8, height: int = 8) -> Image.Image:
    return Image.new("RGB", (width, height), rgb)


def test_images_are_found_by_their_samples_name(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    maker.rollouts("iteration_000001", "i000001")
    wanted = ["i000001.p0001.s02", "i000001.p0000.s01", "i000001.p0009.s00"]
    found = read_images(maker.folder / "iteration_000001/rollouts", wanted)
    assert {name: image.getpixel((3, 3)) for name, image in found.items()} == {
        "i000001.p0001.s02": colour(1, 2),
        "i000001.p0000.s01": colour(0, 1),
    }


def test_small_images_grow_by_whole_pixels_and_large_ones_are_averaged() -> None:
    two = plain((0, 0, 0), 2, 1)
    two.putpixel((1, 0), (255, 255, 255))
    grown = fitted(two, 8)
    assert grown.size == (8, 4)
    assert {grown.getpixel((x, 2)) for x in range(4)} == {(0, 0, 0)}
    assert {grown.getpixel((x, 2)) for x in range(4, 8)} == {(255, 255, 255)}
    stripes = plain((0, 0, 0), 200, 100)
    stripes.paste((255, 255, 255), (0, 0, 200, 50))
    small = fitted(stripes, 20)
    assert small.size == (20, 10)
    assert small.getpixel((10, 1)) == (255, 255, 255)
    assert small.getpixel((10, 8)) == (0, 0, 0)


@pytest.mark.parametrize(("size", "expected"), [((400, 100), (40, 10)), ((30, 20), (30, 20)), ((2000, 1), (40, 1))])
def test_shrinking_keeps_the_shape_and_the_given_image(size: tuple[int, int], expected: tuple[int, int]) -> None:
    image = plain((9, 8, 7), *size)
    assert shrunk(image, 40).size == expected
    assert image.size == size


@pytest.mark.parametrize(("side", "lossless_side", "exact"), [(64, 128, True), (64, 0, False), (300, 128, False)])
def test_small_images_are_lossless_and_photographs_are_not(side: int, lossless_side: int, exact: bool) -> None:
    image = Image.effect_noise((side, side), 90).convert("RGB")
    uri = image_uri(image, lossless_side=lossless_side)
    with Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1]))) as embedded:
        assert (embedded.format, embedded.size) == ("WEBP", image.size)
        assert (embedded.convert("RGB").tobytes() == image.tobytes()) == exact


def test_targets_are_verified_beside_the_storage_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept, gone, changed, broken = (Path(name) for name in ("kept.png", "gone.png", "changed.png", "broken.png"))
    for path in (kept, gone, changed):
        path.write_bytes(png((1, 2, 3)))
    broken.write_bytes(b"no image")
    known = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in (kept, gone, changed, broken)}
    gone.unlink()
    changed.write_bytes(png((9, 9, 9)))
    targets = PromptImages(320)
    found = {path.name: targets.target(str(path), sha256) for path, sha256 in known.items()}
    target = found.pop("kept.png")
    assert target.getpixel((0, 0)) == (1, 2, 3)
    assert set(found.values()) == {None}
    assert set(targets.missing) == {str(gone), str(changed), str(broken)}
    assert known[changed] in targets.missing[str(changed)]
    assert targets.target(None, None) is None
    assert len(targets.missing) == 3
    store = ArtifactStore(str(tmp_path / "runs"), "tiny")
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "0.png").write_bytes(png((1, 2, 3)))
    known = hashlib.sha256(png((1, 2, 3))).hexdigest()
    targets = PromptImages(320, store)
    assert targets.target("targets/0.png", known) is not None
    assert targets.target("targets/1.png", known) is None
    assert list(targets.missing) == ["targets/1.png"]


def test_a_large_transparent_target_lies_over_white(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = Path("large.png")
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(place)
    read = PromptImages(16).target(str(place), hashlib.sha256(place.read_bytes()).hexdigest())
    assert (read.size, read.mode, read.getpixel((0, 0))) == ((16, 16), "RGB", (255, 255, 255))
