import numpy as np
from PIL import Image

from tasks.reports.rescoring import compare, moved_most
from tasks.reports.rescoring_page import Outputs, render_rescoring_page
from tests.tasks.reports.made_samples import made
from tests.tasks.reports.test_run_page import EVIL, Page, check_offline, images

BEFORE, AFTER = [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]


def page(outputs: Outputs, title: str = "scored again", prompt: str = "a sign", label: str = "ssim") -> str:
    rewards = {f"before:{label}": [0.5, 0.25, 0.125], f"after:{label}": [0.5, 0.25, None]}
    samples = made("aaa", BEFORE, AFTER, rewards=rewards, prompts=[prompt] * 3)
    return render_rescoring_page(compare(samples), samples, moved_most(samples), outputs, title)


def test_every_image_is_there_in_a_page_that_opens_offline() -> None:
    colours = {"s0": (10, 20, 30), "s2": (200, 100, 50)}
    html = page({("run", name): Image.new("RGB", (8, 8), colour) for name, colour in colours.items()})
    found = [image.convert("RGB").getpixel((0, 0)) for image in images(check_offline(html))]
    assert found == [colours["s0"], colours["s2"]]


def test_titles_prompts_labels_and_texts_are_data() -> None:
    html = page({("run", "s0"): EVIL, ("run", "s2"): "plain"}, title=EVIL, prompt=EVIL, label=EVIL)
    text = "".join(check_offline(html).text)
    # Title and heading, the reward's row, and of each of two samples the prompt and the reward; of one the text.
    assert text.count(EVIL) == 2 + 1 + 2 * 2 + 1
    assert "49" not in text


def test_ranks_rewards_and_what_is_not_there() -> None:
    said = [" ".join(text.split()) for text in Page(page({})).text if text.strip()]
    text = " ".join(said)
    assert text.count("output not read") == 2
    assert "rank 1 → 3 of 3 -2 , percentile 100 → 0" in text
    assert "rank 3 → 1 of 3 +2 , percentile 0 → 100" in text
    assert "reward 0.300 0.100 advantage +0.00 +0.00 ssim 0.125 –" in text
    assert "reward 0.100 0.300 advantage +0.00 +0.00 ssim 0.500 0.500" in text


def test_samples_that_stayed_are_not_shown() -> None:
    samples = made("aaa", BEFORE, BEFORE)
    assert not Page(render_rescoring_page(compare(samples), samples, moved_most(samples), {}, "t")).named("article")


def test_images_of_any_mode_and_size_become_small() -> None:
    html = page({("run", "s0"): Image.new("CMYK", (900, 300)), ("run", "s2"): Image.new("RGBA", (600, 600))})
    assert [image.size for image in images(Page(html))] == [(256, 85), (256, 256)]


def test_the_plots_count_as_numpy_does() -> None:
    random = np.random.default_rng(1)
    before, after = random.normal(size=(2, 300))
    samples = made("a" * 300, before.tolist(), after.tolist())
    text = Page(render_rescoring_page(compare(samples), samples, moved_most(samples), {}, "t")).text
    said = [each for each in text if "sample" in each and " to " in each]
    joint, _, _ = np.histogram2d(before, after, bins=40)
    counts = [joint[joint > 0], *(np.histogram(side, 40)[0] for side in (before, after))]
    expected = [int(count) for side in counts for count in side.ravel() if count]
    assert [int(each.split()[0]) for each in said] == expected
    i, j = np.argwhere(joint)[0]
    edges = [np.linspace(side.min(), side.max(), 41) for side in (before, after)]
    assert said[0].endswith(
        f"previous {edges[0][i]:.3f} to {edges[0][i + 1]:.3f}, later {edges[1][j]:.3f} to {edges[1][j + 1]:.3f}"
    )
