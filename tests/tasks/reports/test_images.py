import base64
import hashlib
import io
from pathlib import Path

import pytest
from PIL import Image

from tasks.reports.images import TargetReader, fitted, image_uri, read_images, shrunk
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


@pytest.mark.parametrize(
    ("image", "lossless_side", "kind"),
    [
        (Image.effect_noise((64, 64), 90), 128, "PNG"),
        (Image.effect_noise((64, 64), 90), 0, "JPEG"),
        (Image.effect_noise((300, 300), 90), 128, "JPEG"),
        (plain((1, 2, 3), 300, 300), 128, "PNG"),
    ],
)
def test_small_images_are_lossless_and_photographs_are_not(image: Image.Image, lossless_side: int, kind: str) -> None:
    uri = image_uri(image.convert("RGB"), lossless_side=lossless_side)
    with Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1]))) as embedded:
        assert (embedded.format, embedded.size) == (kind, image.size)


def test_targets_are_verified(tmp_path: Path) -> None:
    kept, gone, changed, broken = (tmp_path / name for name in ("kept.png", "gone.png", "changed.png", "broken.png"))
    for path in (kept, gone, changed):
        path.write_bytes(png((1, 2, 3)))
    broken.write_bytes(b"no image")
    known = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in (kept, gone, changed, broken)}
    gone.unlink()
    changed.write_bytes(png((9, 9, 9)))
    targets = TargetReader(320)
    found = {path.name: targets.read(str(path), sha256) for path, sha256 in known.items()}
    target = found.pop("kept.png")
    assert target is not None
    assert target.getpixel((0, 0)) == (1, 2, 3)
    assert set(found.values()) == {None}
    assert set(targets.missing) == {str(gone), str(changed), str(broken)}
    assert known[changed] in targets.missing[str(changed)]
    assert targets.read(None, None) is None
    assert len(targets.missing) == 3


def test_a_large_transparent_target_lies_over_white_and_is_made_smaller(tmp_path: Path) -> None:
    place = tmp_path / "large.png"
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(place)
    read = TargetReader(16).read(str(place), hashlib.sha256(place.read_bytes()).hexdigest())
    assert read is not None
    assert (read.size, read.mode, read.getpixel((0, 0))) == ((16, 16), "RGB", (255, 255, 255))
