import io

import numpy as np
import pytest
import torch
from PIL import Image

from grpo_core.rewards.similarity.tensors import check_pair, to_tensor
from grpo_core.rollouts.images import fit_to, to_rgb
from tests.grpo_core.rewards.conftest import noise, refusal


def first_pixel(image: Image.Image) -> tuple[int, ...]:
    pixel = image.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("RGB", (10, 20, 30), (10, 20, 30)),
        ("1", 1, (255, 255, 255)),
        ("L", 77, (77, 77, 77)),
        ("LA", (77, 255), (77, 77, 77)),
        ("LA", (0, 0), (255, 255, 255)),
        # 0 * 128/255 + 255 * 127/255
        ("RGBA", (0, 0, 0, 128), (127, 127, 127)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("YCbCr", (128, 128, 128), (128, 128, 128)),
        ("I;16", 65535, (255, 255, 255)),
        # 32896 = 128 * 257
        ("I;16", 32896, (128, 128, 128)),
    ],
)
def test_to_rgb_by_hand(mode: str, color: int | tuple[int, ...], expected: tuple[int, ...]) -> None:
    image = to_rgb(Image.new(mode, (3, 2), color), "here")
    assert image.mode == "RGB"
    assert image.size == (3, 2)
    assert first_pixel(image) == expected


@pytest.mark.parametrize("mode", ["P", "PA"])
def test_transparent_palette_entry_becomes_white(mode: str) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.putdata([0, 1])
    if mode == "P":
        image.info["transparency"] = 0
    else:
        image = image.convert("PA")
        alpha = Image.new("L", (2, 1), 255)
        alpha.putpixel((0, 0), 0)
        image.putalpha(alpha)
    converted = to_rgb(image, "here")
    assert first_pixel(converted) == (255, 255, 255)
    assert converted.getpixel((1, 0)) == (0, 0, 200)


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (3, 2))
    image.putpixel((0, 0), (255, 0, 0))
    image.getexif()[0x0112] = 6  # shown a quarter turn clockwise
    upright = to_rgb(image, "here")
    assert upright.size == (2, 3)
    assert upright.getpixel((1, 0)) == (255, 0, 0)


@pytest.mark.parametrize("mode", ["F", "I", "HSV", "LAB"])
def test_mode_without_a_known_meaning_is_refused(mode: str) -> None:
    assert refusal(to_rgb, Image.new(mode, (4, 4)), "7.tif") == ("7.tif", f"image of mode {mode}")


def test_empty_image_is_refused() -> None:
    assert refusal(to_rgb, Image.new("RGB", (0, 5)), "here") == ("here", "0x5")


def image_file(kind: str, exif: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    noise(0, 64, 64).save(buffer, kind, exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        image_file("JPEG")[:1000],
        # No TIFF header.
        image_file("PNG", b"Exif\0\0" + b"XX" * 20),
        # A TIFF header alone.
        image_file("PNG", b"Exif\0\0MM\0*"),
    ],
)
def test_damaged_file_is_refused(content: bytes) -> None:
    assert refusal(to_rgb, Image.open(io.BytesIO(content)), "7.jpg") == ("7.jpg", "image of 64x64")


def test_shrinking_averages_instead_of_picking_pixels() -> None:
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    small = np.asarray(fit_to(Image.fromarray(board).convert("RGB"), (8, 8), "here")).astype(int)
    # Without antialiasing every eighth pixel is of one colour: all 0 or all 255.
    assert abs(small - 127.5).max() <= 4


@pytest.mark.parametrize("size", [(102, 100), (100, 102), (99, 100), (51, 50)])
def test_aspect_up_to_two_percent_off_is_squeezed(size: tuple[int, int]) -> None:
    assert fit_to(Image.new("RGB", size), (50, 50), "here").size == (50, 50)


@pytest.mark.parametrize("size", [(1021, 1000), (1000, 1021), (64, 48)])
def test_aspect_further_off_is_refused(size: tuple[int, int]) -> None:
    refused = refusal(fit_to, Image.new("RGB", size), (50, 50), "7.png")
    assert refused == ("7.png", f"target of {size[0]}x{size[1]} pixels")


def test_equal_size_is_not_resampled() -> None:
    target = Image.new("RGB", (5, 5))
    assert fit_to(target, (5, 5), "here") is target


def test_to_tensor_keeps_levels_rows_and_channels() -> None:
    image = Image.new("RGB", (3, 2))
    image.putpixel((2, 1), (255, 51, 1))
    tensor = to_tensor(image)
    assert tensor.dtype == torch.float32
    assert tensor.shape == (1, 3, 2, 3)
    assert tensor[0, :, 1, 2].tolist() == torch.tensor([255, 51, 1]).div(255).tolist()
    assert tensor.sum() == pytest.approx(307 / 255)


def test_to_tensor_refuses_one_channel() -> None:
    with pytest.raises(ValueError, match="got mode L"):
        to_tensor(Image.new("L", (3, 2)))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "uint8"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.float16), "float16"),
        (torch.zeros(1, 1, 32, 32), r"\[1, 1, 32, 32\]"),
        (torch.zeros(3, 32, 32), r"\[3, 32, 32\]"),
        (torch.full((1, 3, 32, 32), 255.0), "255"),
        (torch.full((1, 3, 32, 32), -1.0), "-1"),
        (torch.full((1, 3, 32, 32), torch.nan), "nan"),
        (torch.zeros(2, 3, 32, 32), "one shape"),
        (torch.zeros(1, 3, 32, 31), "one shape"),
    ],
)
def test_check_pair_refuses_what_would_be_scored_wrongly(tensor: torch.Tensor, message: str) -> None:
    good = torch.zeros(1, 3, 32, 32)
    with pytest.raises(ValueError, match=message):
        check_pair(tensor, good)
    with pytest.raises(ValueError, match=message):
        check_pair(good, tensor)
