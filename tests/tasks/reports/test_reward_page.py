import io

import numpy as np
import polars as pl
import pytest
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


def test_metrics_by_hand() -> None:
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


HEALTHY = [0.1, 0.4, 0.6, 0.9, 0.2, 0.3, 0.7, 0.8]


@pytest.mark.parametrize(
    ("values", "number"),
    [
        ([0.5] * 4 + HEALTHY[4:], "50.0%"),
        ([1.0, 1.0, 0.5, 0.2] * 2, "ceiling, 1, for 50.0%"),
        ([0.0, 0.0, 0.0, 0.2] * 2, "floor, 0, for 75.0%"),
        ([None] * 8, "no value"),
        ([0.1, 0.101, 0.102, 0.103, 0.9, 0.901, 0.902, 0.903], "0.003"),
    ],
)
def test_each_finding_has_its_number(values: list[float | None], number: str) -> None:
    ((subject, text),) = found(made(GROUPS, {"x": values}))
    assert subject == "x"
    assert number in text


def test_failures_are_counted_by_reason() -> None:
    failures = {"x": ["timeout", "timeout", "refused"] + [None] * 5}
    ((subject, text), *_) = found(made(GROUPS, {"x": [None, None, None, *HEALTHY[3:]]}, failures=failures))
    assert subject == "x"
    assert "3 samples (37.5%): timeout (2); refused (1)" in text


def test_noise_is_a_finding_where_it_is_large() -> None:
    scores, values = made(GROUPS, {"x": HEALTHY}), np.array(HEALTHY)
    assert found(scores) == []
    assert found(scores, made(GROUPS, {"x": (values + 0.01).tolist()})) == []
    ((_, noisy),) = found(scores, made(GROUPS, {"x": (values + 0.1).tolist()}))
    assert "differ by 0.1 on average" in noisy
    ((_, lost),) = found(scores, made(GROUPS, {"x": [None, *HEALTHY[1:]]}))
    assert "1 sample" in lost


def test_pairs_that_count_twice_or_pull_apart() -> None:
    rewards = {"x": HEALTHY, "y": [value**2 for value in HEALTHY], "z": [1 - value for value in HEALTHY]}
    expected = [("x and y", "correlation 1.00"), ("x and z", "correlation -1.00"), ("y and z", "correlation -1.00")]
    findings = found(made(GROUPS, rewards))
    assert [subject for subject, _ in findings] == [subject for subject, _ in expected]
    assert all(number in text for (_, text), (_, number) in zip(findings, expected, strict=True))
