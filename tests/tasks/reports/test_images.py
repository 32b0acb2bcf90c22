import base64
import hashlib
import io
from pathlib import Path

import pytest
from PIL import Image

from tasks.reports.images import PromptImages, fitted, image_uri, read_images, shrunk
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.reports.made_runs import RunMaker, colour, png


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


def test_targets_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert target is not None
    assert target.getpixel((0, 0)) == (1, 2, 3)
    assert set(found.values()) == {None}
    assert set(targets.missing) == {str(gone), str(changed), str(broken)}
    assert known[changed] in targets.missing[str(changed)]
    assert targets.target(None, None) is None
    assert len(targets.missing) == 3


def test_relative_targets_are_looked_for_beside_the_storage_root(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "runs"), "tiny")
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "0.png").write_bytes(png((1, 2, 3)))
    known = hashlib.sha256(png((1, 2, 3))).hexdigest()
    targets = PromptImages(320, store)
    assert targets.target("targets/0.png", known) is not None
    assert targets.target("targets/1.png", known) is None
    assert list(targets.missing) == ["targets/1.png"]


def test_a_large_transparent_target_lies_over_white_and_is_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = Path("large.png")
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(place)
    read = PromptImages(16).target(str(place), hashlib.sha256(place.read_bytes()).hexdigest())
    assert read is not None
    assert (read.size, read.mode, read.getpixel((0, 0))) == ((16, 16), "RGB", (255, 255, 255))
