import io

import polars as pl
from rich.console import Console

from flows.terminal.rescoring import show_comparison
from tasks.reports.rescoring import compare, moved_most
from tests.tasks.reports.made_samples import made

HOSTILE = "[red]x[/red] \x1b[2J [/nothing]"


def shown(samples: pl.DataFrame, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_comparison(compare(samples), moved_most(samples), console)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_what_changed_is_told() -> None:
    rewards = {"before:ssim": [0.1, 0.2, 0.3], "after:ssim": [0.3, 0.2, 0.1]}
    samples = made(
        "aaa", [0.1, 0.2, 0.3], [0.3, 0.2, 0.1], rewards=rewards, advantages=([-1.0, 0.0, 1.0], [1.0, 0.0, -1.0])
    )
    text = shown(samples)
    assert "3 samples in 1 group" in text
    assert "ssim 0.200 → 0.200 0.100 → 0.100 0.0% → 0.0% 0.0% → 0.0% -1.000 / -1.000" in text
    assert "sign turned 100.0% of 2 that are not zero on either side" in text
    assert "3 → 1 of 3 0.100 → 0.300 s0 prompt of a" in text


def test_a_narrow_terminal_has_every_figure_in_one_piece() -> None:
    text = shown(made("aaa", [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]), width=80)
    assert "combined mean 0.200 → 0.200 spread in groups 0.100 → 0.100" in text


def test_names_and_prompts_are_data() -> None:
    rewards = {f"before:{HOSTILE}": [0.1, 0.2], f"after:{HOSTILE}": [0.1, 0.2]}
    text = shown(made("aa", [0.1, 0.2], [0.2, 0.1], rewards=rewards, prompts=[HOSTILE] * 2))
    assert "\x1b" not in text
    assert text.count("[red]x[/red] \N{REPLACEMENT CHARACTER}[2J [/nothing]") == 3


def test_where_nothing_moved_it_says_so() -> None:
    assert "No sample's rank moved." in shown(made("aa", [0.1, 0.2], [0.1, 0.2]))


def test_two_runs_are_told_apart() -> None:
    samples = made("abab", [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], runs=["one", "two"] * 2)
    text = shown(samples)
    assert "one s0" in text
    assert "two s1" in text
