import io

import numpy as np
import polars as pl
import pytest
from PIL import Image

from tasks.reports.reward_analysis import analyse
from tasks.reports.reward_plots import (
    normalised,
    plot_agreement,
    plot_cost,
    plot_guardrails,
    plot_histograms,
    plot_label,
    plot_rewards,
    plot_trend,
)
from tests.tasks.reports.made_frames import made_scores

GROUPS, ITERATIONS = "aabb", [1, 1, 2, 2]
HARD = "_hidden $x^2$ \\frac{a}{b} 报酬 \n" + "long " * 20


def scored(seconds: float = 0.5) -> pl.DataFrame:
    rewards = {"x": [0.1, 0.4, 0.2, 0.3], "y": [0.4, 0.1, 0.3, 0.2], "null": [None] * 4}
    return made_scores(GROUPS, rewards, iterations=ITERATIONS, seconds=seconds)


def plotted(scores: pl.DataFrame) -> dict[str, bytes]:
    return plot_rewards(analyse(scores), scores)


def test_plots_say_nothing_of_what_made_them() -> None:
    plots = plotted(scored())
    assert list(plots) == ["histograms.png", "agreement.png", "trend.png", "cost.png"]
    for content in plots.values():
        with Image.open(io.BytesIO(content)) as image:
            assert not image.text  # type: ignore[attr-defined]


def test_what_has_nothing_to_show_is_left_out() -> None:
    alone = made_scores("aa", {"x": [0.1, 0.2]}, seconds=[None, None])
    assert list(plotted(alone)) == ["histograms.png"]


def test_histograms_show_the_counts_and_the_mean() -> None:
    x, _, null = plot_histograms(analyse(scored()), scored()).axes[:3]
    edges = x.patches[0].get_data()  # type: ignore[attr-defined]
    assert edges.values.tolist() == np.histogram([0.1, 0.4, 0.2, 0.3], 40, (0, 1))[0].tolist()
    assert x.lines[0].get_xdata()[0] == pytest.approx(0.25)  # type: ignore[index]
    assert null.get_title("left") == "null\nno values"


def test_agreement_is_symmetric_and_names_what_is_not_defined() -> None:
    figure = plot_agreement(analyse(scored()))
    assert figure is not None
    overall = figure.axes[0].images[0].get_array()
    assert overall is not None
    assert overall[0, 1] == overall[1, 0] == pytest.approx(-1.0)
    said = [text.get_text() for text in figure.axes[0].texts]
    assert said == ["", "-1.00", "–", "-1.00", "", "–", "–", "–", ""]


def test_trend_and_cost_show_their_values() -> None:
    trend, cost = plot_trend(analyse(scored())), plot_cost(analyse(scored(seconds=0.25)))
    assert trend is not None
    assert cost is not None
    assert list(trend.axes[0].lines[0].get_ydata()) == pytest.approx([0.25, 0.25])  # type: ignore[arg-type]
    assert [bar.get_width() for bar in cost.axes[0].patches] == [0.25] * 3  # type: ignore[attr-defined]
    assert {text.get_text().split("  ")[1] for text in cost.axes[0].get_yticklabels()} == {"0.25 s"}


def test_labels_are_text_and_nothing_else() -> None:
    assert plot_label("a$b$") == r"a\$b\$"
    assert plot_label("报\n") == "\N{REPLACEMENT CHARACTER}" * 2
    assert plot_label("a" * 40 + "z", 10) == "aaaaaa…aaz"
    scores = made_scores(GROUPS, {HARD: [0.1, 0.4, 0.2, 0.3], "$": [0.4, 0.1, 0.3, 0.2]}, iterations=ITERATIONS)
    assert len(plotted(scores)) == 4


def test_guardrails_are_multiples_of_their_first_value() -> None:
    assert normalised([None, 4.0, None, 2.0, 8.0]) == [None, 1.0, None, 0.5, 2.0]
    assert normalised([-2.0, -1.0]) == [1.0, 0.5]
    assert normalised([0.0, 1.0]) is None
    assert normalised([None, None]) is None


def test_the_image_depends_on_what_was_measured() -> None:
    contents = []
    for last in (0.5, 0.5, 2.0):
        guardrails = {"sharpness": [1.0, None, last], "$zero": [0.0, 0.0, 1.0], "_none": [None] * 3}
        contents.append(plot_guardrails([0, 1, 2], [0.1, 0.2, None], guardrails))
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("rewards", [[0.5], [None]])
def test_a_single_version_without_guardrails(rewards: list[float | None]) -> None:
    with Image.open(io.BytesIO(plot_guardrails([3], rewards, {}))) as image:
        assert image.width > 600
