import cv2
from PIL import Image, ImageDraw, ImageFilter

from grpo_core.rewards.image_statistics.edge_density import EdgeDensityReward, edge_share
from grpo_core.rewards.reward import Score
from tests.grpo_core.rewards.conftest import flat, make_batch, noise


def split(left: tuple[int, int, int], right: tuple[int, int, int]) -> Image.Image:
    """16x16, its right half of another colour."""
    image = Image.new("RGB", (16, 16), left)
    image.paste(right, (8, 0, 16, 16))
    return image


def test_one_straight_edge_is_one_pixel_wide() -> None:
    scores = EdgeDensityReward().score(make_batch([split((0, 0, 0), (255, 255, 255)), flat(128)]))
    assert scores == [Score(1 / 16, 1 / 16), Score(0.0, 0.0)]


def test_an_edge_between_colours_of_one_brightness_counts() -> None:
    # ITU-R BT.601: 0.299 * 200 = 59.8, 0.587 * 102 = 59.9.
    assert edge_share(split((200, 0, 0), (0, 102, 0)), 50, 100) == 1 / 16


def test_the_gradient_is_four_times_a_step_so_thresholds_are_by_hand() -> None:
    # Sobel sums 1 + 2 + 1 times the difference of 20 levels: 80.
    step = split((100, 100, 100), (120, 120, 120))
    assert edge_share(step, 40, 79) == 1 / 16
    assert edge_share(step, 40, 81) == 0.0


def test_the_outline_of_a_rectangle_is_counted_by_hand() -> None:
    image = Image.new("RGB", (96, 96))
    ImageDraw.Draw(image).rectangle((20, 30, 70, 60), fill=(255, 255, 255))
    # 51 x 31 pixels: twice both sides, the four corners once.
    assert edge_share(image, 50, 100) == (2 * (51 + 31) - 4) / 96**2


def test_blur_lowers_and_noise_raises_it() -> None:
    page = Image.new("RGB", (64, 64), (200, 180, 160))
    for offset in range(0, 64, 8):
        ImageDraw.Draw(page).line((0, offset, 63, offset + 20), fill=(20, 40, 90))
    blurred = page.filter(ImageFilter.GaussianBlur(6))
    shares = [edge_share(image, 50, 100) for image in (flat(90, 64, 64), blurred, page, noise(0, 64, 64))]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[1] < 0.1 * shares[2]


def test_alpha_is_laid_over_white() -> None:
    hidden = Image.merge("RGBA", (*noise(0, 32, 32).split(), Image.new("L", (32, 32), 0)))
    assert EdgeDensityReward().score(make_batch([hidden])) == [Score(0.0, 0.0)]


def test_one_pixel_has_no_edge_and_order_does_not_matter() -> None:
    images = [flat(3, 1, 1), noise(1, 40, 30), noise(2, 33, 65)]
    scores = list(EdgeDensityReward().score(make_batch(images)))
    assert scores[0] == Score(0.0, 0.0)
    assert list(EdgeDensityReward().score(make_batch(images[::-1])))[::-1] == scores


def test_version_names_opencv() -> None:
    assert EdgeDensityReward().version == f"1+opencv-{cv2.__version__}"
