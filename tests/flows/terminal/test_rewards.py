import io

import polars as pl
from rich.console import Console

from flows.terminal.rewards import show_analysis
from tasks.reports.reward_analysis import analyse
from tests.tasks.reports.made_scores import made

HOSTILE = "[red]x[/red] \x1b[2J [/nothing]"
VALUES = [0.0, 1.0, 0.25, 0.75]


def shown(scores: pl.DataFrame, width: int = 220) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_analysis(analyse(scores), console)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_figures_findings_and_agreement_are_told() -> None:
    text = shown(made("aabb", {"x": VALUES, "y": VALUES}))
    assert "4 samples in 2 groups" in text
    assert "x and y order siblings nearly alike (rank correlation 1.00): one counts twice" in text
    assert "x 0.5 ± 0.4564 0 | 0.5 | 1 25.0% | 25.0% | 25.0%" in text
    assert "x, y 1.00 1.00 100.0% 4" in text


def test_a_narrow_terminal_has_every_figure_in_one_piece() -> None:
    text = shown(made("aabb", {"x": VALUES}), width=80)
    assert "x mean ± std 0.5 ± 0.4564 minimum | median | maximum 0 | 0.5 | 1" in text
    assert "Agreement" not in text


def test_labels_and_reasons_are_data() -> None:
    text = shown(made("aa", {HOSTILE: [None, 0.5]}, failures={HOSTILE: [HOSTILE, None]}))
    assert "\x1b" not in text
    assert text.count("[red]x[/red] \N{REPLACEMENT CHARACTER}[2J [/nothing]") >= 3


def test_many_pairs_are_counted() -> None:
    text = shown(made("aabb", {f"r{index}": VALUES for index in range(6)}))
    assert "12 of 15 pairs; the page shows all" in text
