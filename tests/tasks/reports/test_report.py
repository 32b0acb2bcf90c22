import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markupsafe import Markup

from tasks.reports.report import Notice, Report, Table, markdown_of, render
from tasks.reports.text import (
    METRICS,
    excerpt,
    fenced,
    in_cell,
    metric_rows,
    metric_title,
    one_line,
    printable,
    sparkline,
    visible,
)
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tests.tasks.reports.made_runs import whole_run
from tests.tasks.reports.test_run_page import EVIL, check_offline

FAMILY, IDEOGRAPHIC_SPACE = "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u3000"
SPACED = "\u200c\u200d\xa0\u202f\u3000"
"""Joiners and spaces that no surface names by their code points, so that words and emoji are read as they are."""

anything = st.text(st.sampled_from(f"ab 0.|`*_~<>&\\#[]()!-/:@\n\r\t\x00\x1b\x85\u2028\u202e\u3000é中🙂{FAMILY}"))
PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def test_a_text_that_fits_is_left_alone_and_a_long_one_keeps_both_ends() -> None:
    assert excerpt("two\nlines", 9) == "two\nlines"
    assert excerpt("0123456789", 6) == "0123 … 89"
    assert excerpt("a\nb\nc\nd\ne", 90, lines=3) == "a\nb … e"
    assert one_line("  think\r\nanswer\n", 40) == "think ⏎ answer"
    table = Table("", ROWS)
    assert table.head(len(ROWS), "texts") is table
    assert table.head(2, "texts").rows == ROWS[:2]
    assert table.head(2, "texts").note.startswith(f"2 of {len(ROWS)} texts")


@given(anything, st.integers(3, 40), st.integers(3, 9))
def test_the_ends_of_a_text_are_no_longer_than_requested(text: str, letters: int, lines: int) -> None:
    shown = excerpt(text, letters, lines)
    assert len(shown) <= letters + len(" … ")
    assert shown.count("\n") <= lines - 1
    assert (shown == text) == (len(text) <= letters and text.count("\n") < lines)


def inline_of(cell: str) -> list[tuple[str, str]]:
    """Type and content of what a Markdown parser finds in a cell of a table."""
    last = [token for token in PARSER.parse(f"| a |\n|---|\n| {cell} |") if token.type == "inline"][-1]
    return [
        (child.info if child.type == "text_special" else child.type, child.content) for child in last.children or []
    ]


ADDRESS = re.compile(r"://|www\.|\S@\S", re.IGNORECASE)
MARKUP = [
    "a|b",
    "**b**",
    "<img src=x>",
    "[a](http://x)",
    "www.x.org",
    "`c`",
    "a\\|b",
    "~~s~~",
    "me@x.org",
    "&lt;",
    "_a_",
    "&#60;i&#62;",
    "# head",
    "see https://x/a_b, WWW.x.org",
    "`http://x`me@x",
]


def read_cell(cell: str) -> tuple[str, str]:
    """What a cell shows, and the part of it in which GitHub's Markdown looks for addresses: everything but code."""
    found = inline_of(cell)
    # Prefect's UI shows an "entity" as it is written.
    assert {kind for kind, _ in found} <= {"text", "escape", "code_inline"}
    return "".join(each for _, each in found), "".join(each if kind != "code_inline" else " " for kind, each in found)


@pytest.mark.parametrize("text", [*MARKUP, 'a red, "old" door: no. 5 (left-most)!'])
def test_a_cell_shows_its_text_and_no_markup(text: str) -> None:
    shown, linked = read_cell(in_cell(text))
    assert shown == text
    assert not ADDRESS.search(linked)
    assert (in_cell(text) == text) == (text not in MARKUP)


@given(st.lists(st.sampled_from([*MARKUP, "`", "``", "\\", "|", " ", "x", "!", "#", "-"]), max_size=8).map("".join))
def test_no_mixture_of_markup_is_markup(text: str) -> None:
    shown, linked = read_cell(in_cell(text))
    assert shown == text.strip()
    assert not ADDRESS.search(linked)


@given(anything)
@example(f"a family {FAMILY},{IDEOGRAPHIC_SPACE}{IDEOGRAPHIC_SPACE}|{IDEOGRAPHIC_SPACE}")
def test_a_cell_is_one_line_without_columns(text: str) -> None:
    cell = in_cell(one_line(text, 50))
    assert re.search(r"(?<!\\)(?:\\\\)*\|", cell) is None
    assert len(cell.splitlines()) <= 1
    assert all(each.isprintable() or each in SPACED for each in cell)
    shown, linked = read_cell(cell)
    assert shown == printable(one_line(text, 50)).strip()
    assert not ADDRESS.search(linked)


def test_joiners_and_spaces_of_scripts_are_kept_and_what_a_terminal_obeys_is_named() -> None:
    text = f"{FAMILY}{IDEOGRAPHIC_SPACE}x"
    assert in_cell(text) == printable(text) == visible(text) == text
    assert printable("\x1b\u202e\t") == "⟨U+001B⟩⟨U+202E⟩⟨U+0009⟩"
    assert fenced("a\n```\nb | *c*\t<d>\x1b") == "````text\na\n```\nb | *c*\t<d>⟨U+001B⟩\n````"


@given(anything)
def test_a_fence_is_closed_by_its_own_end_alone(text: str) -> None:
    """As CommonMark reads it: a line of at least as many backticks as the opening one ends the block."""
    first, *lines = fenced(text).split("\n")
    fence = re.match("`+", first)
    ends = [index for index, line in enumerate(lines) if re.fullmatch(rf" {{0,3}}`{{{len(fence[0])},}}\s*", line)]
    assert ends == [len(lines) - 1]


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == sparkline([2.0, 2.0000000000000004]) == "▅▅"
    assert sparkline([]) == ""
    assert sparkline([0, 0, 10, 10, 0, 0], width=3) == "▁█▁"
    assert len(sparkline(list(range(1000)), width=30)) == 30
    assert sparkline([2.0, 4.0], scale=(0.0, 8.0)) == "▃▅"
    assert sparkline([8.0, 8.0], scale=(0.0, 8.0)) == "██"


OF_THE_CONFIGURATION = (
    "rewards/answer/mean",
    "rewards/answer/std",
    "rewards/answer/null",
    "rewards/answer/failed",
    "datasets/sums/reward",
    "guardrails/jpeg",
)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("rewards/ssim/mean", "ssim: mean"),
        ("rewards/a/b/null", "a/b: images without a score"),
        ("rewards/{label}/std", "{label}: standard deviation"),
        ("guardrails/a/b", "a/b (guardrail)"),
        ("guardrails/{noun}", "{noun} (guardrail)"),
        ("datasets/a/b/reward", "a/b: reward"),
        ("datasets/{noun}/reward", "{noun}: reward"),
        ("rewards/ssim/median", "rewards/ssim/median"),
        ("rewards/mean", "rewards/mean"),
        ("new_metric", "new_metric"),
        ("denoising/kl", "KL to the reference, denoising"),
        ("denoising/clip_ratio/region_mean", "clipped noisy steps, denoising"),
        ("clip_ratio/region_mean", "clipped tokens"),
        ("denoising/datasets/signs/reward", "signs: reward, denoising"),
        ("denoising/", "denoising/"),
    ],
)
def test_labels_may_be_any_words_and_an_unknown_name_is_its_own_title(name: str, title: str) -> None:
    assert metric_title(name)[0] == title


def test_every_metric_of_a_run_has_a_title_in_words(tmp_path: Path) -> None:
    shown = read_run(RunReader(whole_run(tmp_path).store)).shown
    for name in {*shown.metrics, *OF_THE_CONFIGURATION, *(name for name in METRICS if "{" not in name)}:
        text, image = metric_title(name, "completion"), metric_title(name, "image")
        for title, meaning in (text, image, metric_title(name, "image", "denoising")):
            assert meaning
            assert not set("/_{}") & set(title)
            assert not set("{}") & set(meaning)
        assert "image" not in "".join(text)
        assert "completion" not in "".join(image)
    titles = [row["title"] for row in METRICS.values()]
    assert len(set(titles)) == len(titles)


def test_the_reward_comes_first_and_a_second_stream_follows() -> None:
    rows = metric_rows({"a": 1.0, "kl": 2.0, "reward": 3.0}, "image")
    assert [(name, value) for _, _, name, value in rows] == [("reward", 3.0), ("kl", 2.0), ("a", 1.0)]
    rows = metric_rows({"denoising/kl": 1.0, "kl": 2.0, "denoising/reward": 3.0, "reward": 4.0}, "image")
    assert [name for _, _, name, _ in rows] == ["reward", "denoising/reward", "kl", "denoising/kl"]


ROWS = [{"name": text, "number": "1"} for text in MARKUP]


def report_of(text: str) -> Report:
    table = Table(text, [{text: text, "words": text}], ("words",), text, text)
    return Report(
        text, [(text, text)], [table, Table("empty", [])], [Notice(text, [text]), Notice("silent", [])], [text]
    )


def test_markdown_has_all_of_it_as_text() -> None:
    for text in MARKUP:
        inline = [
            token for token in PARSER.parse(markdown_of(report_of(text))) if token.type == "inline" and token.content
        ]
        # Two of the notice, two of the fact; of the table its title, heading, two cells and note; title and last note.
        said = ["".join(child.content for child in token.children or []) for token in inline]
        assert said.count(text) == 2 + 2 + 5 + 2, said
        assert set(said) == {text, "words"}
        kinds = {child.type for token in inline for child in token.children or []}
        assert kinds <= {"text", "text_special", "code_inline", "strong_open", "strong_close"}


def test_a_page_has_all_of_it_as_text_but_for_cells_that_are_markup() -> None:
    page = check_offline(_page(report_of(EVIL)))
    # Also the table's meaning, and the title of the window.
    assert "".join(page.text).count(visible(EVIL)) == 2 + 2 + 6 + 2 + 1
    assert "ranranran" not in "".join(page.text)
    assert check_offline(_page(Report("r", tables=[Table("", [{"a": Markup("<i>x</i>")}])]))).named("i")


def _page(report: Report) -> str:
    return render("rewards.html.jinja", title=report.title, subtitle="", summary=report, distributions={}, plots=[])
