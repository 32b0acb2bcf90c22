import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from tasks.reports.images import SheetRow, contact_sheet, data_uri, fitted, image_uri, read_images, shrunk
from tests.tasks.reports.made_runs import RunMaker, colour


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


def test_a_data_uri_contains_the_bytes() -> None:
    assert data_uri(b"\x00<>\xff", "image/png") == "data:image/png;base64,ADw+/w=="


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


def colours(image: Image.Image) -> list[tuple[int, int, int]]:
    """Solid colours from left to right, halfway down the first row of images."""
    line = [image.getpixel((x, 52 + 48)) for x in range(230, image.width)]
    background = image.getpixel((image.width - 1, image.height - 1))
    seen = [
        pixel for index, pixel in enumerate(line) if pixel != background and (not index or line[index - 1] != pixel)
    ]
    return [pixel for pixel in seen if isinstance(pixel, tuple)]


def test_the_sheet_has_target_before_and_after_in_this_order() -> None:
    red, green, blue, grey, white = (250, 1, 1), (1, 250, 1), (1, 1, 250), (90, 90, 90), (255, 255, 255)
    row = SheetRow("a prompt", plain(red), [plain(green), plain(blue)], [plain(grey), plain(white)], 0.25, 0.5)
    assert colours(contact_sheet([row], title="t")) == [red, green, blue, grey, white]


def test_without_targets_there_is_no_column_for_them() -> None:
    row = SheetRow("a prompt", None, [plain((1, 2, 3))], [plain((4, 5, 6))], None, None)
    narrow = contact_sheet([row], title="t")
    wide = contact_sheet([SheetRow("p", plain((7, 8, 9)), row.before, row.after, None, None)], title="t")
    assert colours(narrow) == [(1, 2, 3), (4, 5, 6)]
    assert colours(wide) == [(7, 8, 9), (1, 2, 3), (4, 5, 6)]
    assert wide.width > narrow.width


def test_every_prompt_has_a_row_of_the_sheet() -> None:
    row = SheetRow("word " * 100, None, [plain((1, 2, 3))], [plain((4, 5, 6))], 0.1, 0.2)
    one, three = (contact_sheet([row] * count, title="t", side=50) for count in (1, 3))
    assert three.height - one.height == 2 * 56
    assert three.getpixel((231, 52 + 2 * 56 + 25)) == (1, 2, 3)
