import io

import numpy as np
import polars as pl
from PIL import Image

from tasks.reports.reward_analysis import analyse
from tasks.reports.reward_page import findings, render_reward_page
from tests.tasks.reports.made_scores import made
from tests.tasks.reports.test_run_page import EVIL, Page, check_offline, images

GROUPS = "a" * 4 + "b" * 4


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (300, 200), colour).save(buffer, "PNG")
    return buffer.getvalue()


def said(page: Page) -> str:
    return " ".join(" ".join(page.text).split())


def test_plots_are_embedded_in_a_page_that_opens_offline() -> None:
    scores = made("aabb", {"x": [0.1, 0.4, 0.2, 0.3]})
    html = render_reward_page(analyse(scores), {"b.png": png("red"), "a.png": png("blue")}, "Rewards")
    page = check_offline(html)
    assert [image["alt"] for image in page.named("img")] == ["b", "a"]
    assert [image.convert("RGB").getpixel((9, 9)) for image in images(page)] == [(255, 0, 0), (0, 0, 255)]


def test_labels_titles_and_reasons_are_data() -> None:
    scores = made("aa", {EVIL: [None, 0.5], "x": [0.1, 0.2]}, failures={EVIL: [EVIL, None]})
    page = check_offline(render_reward_page(analyse(scores), {EVIL: png("red")}, EVIL))
    # Title, heading, the reward's row, its pair, and of its two findings the subjects and one reason.
    assert "".join(page.text).count(EVIL) == 2 + 1 + 1 + 2 + 1


def test_figures_by_hand() -> None:
    scores = made("aabb", {"x": [0.0, 1.0, 0.25, 0.75], "y": [0.0, 1.0, 0.75, 0.25]}, seconds=2.0)
    text = said(Page(render_reward_page(analyse(scores, scores), {}, "Rewards")))
    assert "2 rewards over 4 samples in 2 groups of run" in text
    figures = "x 0.5 ± 0.4564 0 | 0.5 | 1 25.0% | 25.0% | 25.0% 0.0% | 0 0.0% 0.5303 | 1.16 0 | 0 2 | 2"
    assert figures in text
    assert "x, y 0.80 0.00 50.0% 4" in text
    assert "Noise is the difference between two scorings" in text


def test_a_single_reward_has_no_agreement() -> None:
    text = said(Page(render_reward_page(analyse(made("a", {"x": [0.5]})), {}, "Rewards")))
    assert "Spearman" not in text
    assert "noise is not known" in text


def found(scores: pl.DataFrame, repeats: pl.DataFrame | None = None) -> list[tuple[str, str]]:
    return [(finding.subject, finding.text) for finding in findings(analyse(scores, repeats))]


def test_a_healthy_reward_is_not_spoken_of() -> None:
    assert found(made(GROUPS, {"x": [0.1, 0.4, 0.6, 0.9, 0.2, 0.3, 0.7, 0.8]})) == []


def test_each_ailment_is_named_with_its_figure() -> None:
    flat = [("x", "is the same for all siblings in 50.0% of the groups: these teach nothing")]
    assert found(made(GROUPS, {"x": [0.5] * 4 + [0.2, 0.3, 0.7, 0.8]})) == flat
    ceiling = [("x", "is at the ceiling, 1, for 50.0% of the samples")]
    assert found(made(GROUPS, {"x": [1.0, 1.0, 0.5, 0.2] * 2})) == ceiling
    floor = [("x", "is at the floor, 0, for 75.0% of the samples")]
    assert found(made(GROUPS, {"x": [0.0, 0.0, 0.0, 0.2] * 2})) == floor
    assert found(made(GROUPS, {"x": [None] * 8})) == [("x", "has no value for any sample: it teaches nothing")]
    ((_, prompt),) = found(made(GROUPS, {"x": [0.1, 0.101, 0.102, 0.103, 0.9, 0.901, 0.902, 0.903]}))
    assert prompt == "tells prompts apart, not their samples: spread within groups is 0.003 of the whole"


def test_failures_are_told_with_their_reasons() -> None:
    failures = {"x": ["timeout", "timeout", "refused"] + [None] * 5}
    scores = made(GROUPS, {"x": [None, None, None, 0.9, 0.2, 0.3, 0.7, 0.8]}, failures=failures)
    (first, *_) = found(scores)
    assert first == ("x", "failed for 3 samples (37.5%): timeout (2); refused (1)")


def test_noise_is_told_where_it_drowns_the_signal() -> None:
    values = np.array([0.1, 0.4, 0.6, 0.9, 0.2, 0.3, 0.7, 0.8])
    scores = made(GROUPS, {"x": values.tolist()})
    assert found(scores, made(GROUPS, {"x": (values + 0.01).tolist()})) == []
    ((_, noisy),) = found(scores, made(GROUPS, {"x": (values + 0.1).tolist()}))
    assert noisy.startswith("is noisy: two scorings differ by 0.1 on average, ")
    ((_, lost),) = found(scores, made(GROUPS, {"x": [None, *values[1:].tolist()]}))
    assert lost == "gave a value only one of two times for 1 sample"


def test_pairs_that_count_twice_or_pull_apart() -> None:
    values = [0.1, 0.4, 0.6, 0.9, 0.2, 0.3, 0.7, 0.8]
    rewards = {"x": values, "y": [value**2 for value in values], "z": [1 - value for value in values]}
    assert found(made(GROUPS, rewards)) == [
        ("x and y", "order siblings nearly alike (rank correlation 1.00): one counts twice"),
        ("x and z", "pull against each other within groups (rank correlation -1.00)"),
        ("y and z", "pull against each other within groups (rank correlation -1.00)"),
    ]
