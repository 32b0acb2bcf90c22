import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tasks.reports.text import excerpt, fenced, in_cell, one_line, sparkline

anything = st.text(st.characters(codec="utf-8"))


def test_a_text_that_fits_is_left_alone_and_a_long_one_keeps_both_ends() -> None:
    assert excerpt("two\nlines", 9) == "two\nlines"
    assert excerpt("0123456789", 6) == "0123 … 89"
    assert excerpt("a\nb\nc\nd\ne", 90, lines=3) == "a\nb … e"
    assert one_line("  think\r\nanswer\n", 40) == "think ⏎ answer"


@given(anything, st.integers(3, 40), st.integers(3, 9))
def test_the_ends_of_a_text_are_no_longer_than_requested(text: str, letters: int, lines: int) -> None:
    shown = excerpt(text, letters, lines)
    assert len(shown) <= letters + len(" … ")
    assert shown.count("\n") <= lines - 1
    assert (shown == text) == (len(text) <= letters and text.count("\n") < lines)


def inline_of(cell: str) -> list[tuple[str, str]]:
    """Type and content of what a Markdown parser finds in a cell of a table."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(f"| a |\n|---|\n| {cell} |")
    last = [token for token in tokens if token.type == "inline"][-1]
    return [(child.type, child.content) for child in last.children or []]


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
]


@pytest.mark.parametrize("text", [*MARKUP, 'a red, "old" door: no. 5 (left-most)!'])
def test_a_cell_shows_its_text_and_no_markup(text: str) -> None:
    shown = in_cell(text)
    assert {kind for kind, _ in inline_of(shown)} <= {"text", "text_special"}
    assert "".join(content for _, content in inline_of(shown)) == text
    # GitHub's Markdown makes links of these.
    assert not re.search(r"://|www\.|@", shown)
    assert (shown == text) == (text not in MARKUP)


@given(anything)
def test_a_cell_is_one_line_without_columns(text: str) -> None:
    shown = in_cell(one_line(text, 50))
    assert "|" not in shown
    assert len(shown.splitlines()) <= 1
    assert re.sub(r"&#\d+;", "", shown).isprintable()


@given(anything)
def test_a_fence_is_closed_by_its_own_end_alone(text: str) -> None:
    """As CommonMark reads it: a line of at least as many backticks as the opening one ends the block."""
    first, *lines = fenced(text).split("\n")
    fence = re.match("`+", first)
    assert fence is not None
    ends = [index for index, line in enumerate(lines) if re.fullmatch(rf" {{0,3}}`{{{len(fence[0])},}}\s*", line)]
    assert ends == [len(lines) - 1]


def test_a_fence_shows_the_text_unchanged() -> None:
    assert fenced("a\n```\nb | *c*\t<d>\x1b") == "````text\na\n```\nb | *c*\t<d>\N{REPLACEMENT CHARACTER}\n````"


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▅▅"
    assert sparkline([]) == ""
    assert sparkline([0, 0, 10, 10, 0, 0], width=3) == "▁█▁"
    assert len(sparkline(list(range(1000)), width=30)) == 30
