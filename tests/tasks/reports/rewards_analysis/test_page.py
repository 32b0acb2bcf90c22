import io
import re

from PIL import Image

from tasks.reports.rewards_analysis.analyse import analyse
from tasks.reports.rewards_analysis.page import analysis_page
from tests.tasks.reports.rewards_analysis.made_scores import made
from tests.tasks.reports.test_page import EVIL, Page, images


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (300, 200), colour).save(buffer, "PNG")
    return buffer.getvalue()


def said(page: Page) -> str:
    return " ".join(" ".join(page.text).split())


def test_plots_are_embedded_and_nothing_is_asked_of_any_server() -> None:
    scores = made("aabb", {"x": [0.1, 0.4, 0.2, 0.3]})
    html = analysis_page(analyse(scores), {"b.png": png("red"), "a.png": png("blue")}, "Rewards")
    page = Page(html)
    assert page.open == []
    assert not page.named("script")
    assert not re.search(r"url\(|@import|https?:", html)
    assert any("default-src 'none'" in (meta.get("content") or "") for meta in page.named("meta"))
    assert [image["alt"] for image in page.named("img")] == ["b", "a"]
    assert [image.convert("RGB").getpixel((9, 9)) for image in images(page)] == [(255, 0, 0), (0, 0, 255)]


def test_labels_titles_and_reasons_are_data() -> None:
    scores = made("aa", {EVIL: [None, 0.5], "x": [0.1, 0.2]}, failures={EVIL: [EVIL, None]})
    page = Page(analysis_page(analyse(scores), {EVIL: png("red")}, EVIL))
    assert page.open == []
    assert not page.named("script")
    # Title, heading, the reward's row, its pair, and of its two findings the subjects and one reason.
    assert "".join(page.text).count(EVIL) == 2 + 1 + 1 + 2 + 1


def test_figures_by_hand() -> None:
    scores = made("aabb", {"x": [0.0, 1.0, 0.25, 0.75], "y": [0.0, 1.0, 0.75, 0.25]}, seconds=2.0)
    text = said(Page(analysis_page(analyse(scores, scores), {}, "Rewards")))
    assert "2 rewards over 4 samples in 2 groups of run" in text
    figures = "x 0.5 ± 0.4564 0 | 0.5 | 1 25.0% | 25.0% | 25.0% 0.0% | 0 0.0% 0.5303 | 1.16 0 | 0 2 | 2"
    assert figures in text
    assert "x, y 0.80 0.00 50.0% 4" in text
    assert "Noise is the difference between two scorings" in text


def test_a_single_reward_has_no_agreement() -> None:
    text = said(Page(analysis_page(analyse(made("a", {"x": [0.5]})), {}, "Rewards")))
    assert "Spearman" not in text
    assert "noise is not known" in text
