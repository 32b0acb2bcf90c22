"""Rewards and rescorings in the terminal: key numbers, narrow terminals, hostile names."""

import io
from collections.abc import Callable

import polars as pl
import pytest
from rich.console import Console

from flows.terminal.rewards import show_analysis, show_comparison
from tasks.reports.rescoring import compare, moved_most
from tasks.reports.reward_analysis import analyse
from tests.tasks.reports.made_frames import made_samples, made_scores

HOSTILE = "[red]x[/red] \x1b[2J [/nothing]"
SHOWN = "[red]x[/red] \N{REPLACEMENT CHARACTER}[2J [/nothing]"
VALUES = [0.0, 1.0, 0.25, 0.75]


def shown(show: Callable[[Console], None], width: int = 220) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(console)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def rescored(samples: pl.DataFrame, width: int = 220) -> str:
    return shown(lambda console: show_comparison(compare(samples), moved_most(samples), console), width)


def analysed(scores: pl.DataFrame, width: int = 220) -> str:
    return shown(lambda console: show_analysis(analyse(scores), console), width)


def test_a_rescoring_shows_rewards_advantages_and_moved_samples() -> None:
    rewards = {"before:ssim": [0.1, 0.2, 0.3], "after:ssim": [0.3, 0.2, 0.1]}
    turned = ([-1.0, 0.0, 1.0], [1.0, 0.0, -1.0])
    text = rescored(made_samples("aaa", [0.1, 0.2, 0.3], [0.3, 0.2, 0.1], rewards=rewards, advantages=turned))
    assert "3 samples in 1 group" in text
    assert "ssim 0.200 → 0.200 0.100 → 0.100 0.0% → 0.0% 0.0% → 0.0% -1.000 / -1.000" in text
    assert "100.0% of 2" in text
    assert "3 → 1 of 3 0.100 → 0.300 s0 prompt of a" in text


def test_a_rescoring_of_two_runs_tells_their_samples_apart() -> None:
    samples = made_samples("abab", [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], runs=["one", "two"] * 2)
    text = rescored(samples)
    assert "one s0" in text
    assert "two s1" in text


def test_an_analysis_shows_metrics_findings_and_agreement() -> None:
    text = analysed(made_scores("aabb", {"x": VALUES, "y": VALUES}))
    assert "4 samples in 2 groups" in text
    assert "rank correlation 1.00" in text
    assert "x, y 1.00 1.00 100.0% 4" in text


def test_many_pairs_are_counted() -> None:
    assert "12 of 15" in analysed(made_scores("aabb", {f"r{index}": VALUES for index in range(6)}))


@pytest.mark.parametrize("width", [60, 80, 120, *range(130, 211, 10)])
def test_at_any_width_every_number_is_shown_in_one_piece(width: int) -> None:
    text = rescored(made_samples("aaa", [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]), width)
    for cell in ("0.200 → 0.200", "0.100 → 0.100", "0.0% → 0.0%", "-1.000 / -1.000"):
        assert cell in text
    text = analysed(made_scores("aabb", {"x": VALUES, "long " * 9: VALUES}, seconds=0.0123), width)
    for cell in ("0.5 ± 0.4564", "0 | 0.5 | 1", "25.0% | 25.0% | 25.0%", "0.5303 | 1.16", "0.0123 | 0.0123"):
        assert cell in text


def test_names_prompts_and_reasons_are_data() -> None:
    rewards = {f"before:{HOSTILE}": [0.1, 0.2], f"after:{HOSTILE}": [0.1, 0.2]}
    samples = made_samples("aa", [0.1, 0.2], [0.2, 0.1], rewards=rewards, prompts=[HOSTILE] * 2)
    scores = made_scores("aa", {HOSTILE: [None, 0.5]}, failures={HOSTILE: [HOSTILE, None]})
    for text in (rescored(samples), analysed(scores)):
        assert "\x1b" not in text
        assert text.count(SHOWN) >= 3
