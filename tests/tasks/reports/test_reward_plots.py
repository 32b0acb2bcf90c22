import io

import numpy as np
import pytest
from matplotlib.text import Annotation
from PIL import Image

from tasks.reports.plots import plot_label
from tasks.reports.reward_analysis import RewardAnalysis, analyse
from tasks.reports.reward_plots import plot_agreement, plot_cost, plot_histograms, plot_rewards, plot_trend
from tests.tasks.reports.made_scores import made

GROUPS, ITERATIONS = "aabb", [1, 1, 2, 2]
HARD = "_hidden $x^2$ \\frac{a}{b} 报酬 \n" + "long " * 20


def analysed(seconds: float = 0.5) -> RewardAnalysis:
    rewards = {"x": [0.1, 0.4, 0.2, 0.3], "y": [0.4, 0.1, 0.3, 0.2], "null": [None] * 4}
    return analyse(made(GROUPS, rewards, iterations=ITERATIONS, seconds=seconds))


def test_the_same_scores_give_the_same_bytes() -> None:
    first, second = plot_rewards(analysed()), plot_rewards(analysed())
    assert list(first) == ["histograms.png", "agreement.png", "trend.png", "cost.png"]
    assert first == second
    for content in first.values():
        with Image.open(io.BytesIO(content)) as image:
            assert not image.text  # type: ignore[attr-defined]


def test_what_has_nothing_to_show_is_left_out() -> None:
    alone = analyse(made("aa", {"x": [0.1, 0.2]}, seconds=[None, None]))
    assert list(plot_rewards(alone)) == ["histograms.png"]


def test_histograms_show_the_counts_and_the_mean() -> None:
    x, _, null = plot_histograms(analysed()).axes[:3]
    edges = x.patches[0].get_data()  # type: ignore[attr-defined]
    assert edges.values.sum() == 4
    assert edges.edges[np.flatnonzero(edges.values)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert x.lines[0].get_xdata()[0] == pytest.approx(0.25)  # type: ignore[index]
    assert [text.get_text() for text in null.texts] == ["no values"]


def test_agreement_is_symmetric_and_names_what_is_not_defined() -> None:
    figure = plot_agreement(analysed())
    assert figure is not None
    overall = figure.axes[0].images[0].get_array()
    assert overall is not None
    assert overall[0, 1] == overall[1, 0] == pytest.approx(-1.0)
    said = [text.get_text() for text in figure.axes[0].texts]
    assert said == ["", "-1.00", "–", "-1.00", "", "–", "–", "–", ""]


def test_trend_and_cost_show_their_values() -> None:
    trend, cost = plot_trend(analysed()), plot_cost(analysed(seconds=0.25))
    assert trend is not None
    assert cost is not None
    assert list(trend.axes[0].lines[0].get_ydata()) == pytest.approx([0.25, 0.25])  # type: ignore[arg-type]
    assert [bar.get_width() for bar in cost.axes[0].patches] == [0.25] * 3  # type: ignore[attr-defined]
    assert [text.get_text() for text in cost.axes[0].texts if isinstance(text, Annotation)] == ["0.25 s"] * 3


def test_labels_are_text_and_nothing_else() -> None:
    assert plot_label("a$b$") == r"a\$b\$"
    assert plot_label("报\n") == "\N{REPLACEMENT CHARACTER}" * 2
    assert plot_label("a" * 40 + "z", 10) == "aaaaaa…aaz"
    scores = made(GROUPS, {HARD: [0.1, 0.4, 0.2, 0.3], "$": [0.4, 0.1, 0.3, 0.2]}, iterations=ITERATIONS)
    assert len(plot_rewards(analyse(scores))) == 4
