import re

from PIL import Image

from tasks.reports.rescoring.compare import compare
from tasks.reports.rescoring.moved import moved_most
from tasks.reports.rescoring.page import Outputs, rescoring_page
from tests.tasks.reports.rescoring.made_samples import made
from tests.tasks.reports.test_page import EVIL, Page, images

BEFORE, AFTER = [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]


def page(outputs: Outputs, title: str = "scored again", prompt: str = "a sign", label: str = "ssim") -> str:
    rewards = {f"before:{label}": [0.5, 0.25, 0.125], f"after:{label}": [0.5, 0.25, None]}
    samples = made("aaa", BEFORE, AFTER, rewards=rewards, prompts=[prompt] * 3)
    return rescoring_page(compare(samples), moved_most(samples), outputs, title)


def test_nothing_is_asked_of_any_server_and_every_image_is_there() -> None:
    colours = {"s0": (10, 20, 30), "s2": (200, 100, 50)}
    html = page({("run", name): Image.new("RGB", (8, 8), colour) for name, colour in colours.items()})
    built = Page(html)
    assert built.open == []
    assert not re.search(r"url\(|@import|https?:", html)
    for tag, attributes in built.elements:
        assert tag not in ("script", "link", "iframe", "object", "base", "form")
        assert not any(name.startswith("on") for name in attributes)
    assert any("default-src 'none'" in (meta.get("content") or "") for meta in built.named("meta"))
    found = [image.convert("RGB").getpixel((0, 0)) for image in images(built)]
    assert found == [colours["s0"], colours["s2"]]


def test_whatever_was_written_is_data() -> None:
    html = page({("run", "s0"): EVIL, ("run", "s2"): "plain"}, title=EVIL, prompt=EVIL, label=EVIL)
    built = Page(html)
    assert built.open == []
    assert not built.named("script")
    text = "".join(built.text)
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
    assert "No sample's rank moved" in rescoring_page(compare(samples), moved_most(samples), {}, "t")


def test_images_of_any_mode_and_size_become_small() -> None:
    html = page({("run", "s0"): Image.new("CMYK", (900, 300)), ("run", "s2"): Image.new("RGBA", (600, 600))})
    assert [image.size for image in images(Page(html))] == [(256, 85), (256, 256)]
