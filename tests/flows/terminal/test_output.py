"""A report in the terminal: its order, numbers in one piece at any width, and data that commands nothing."""

import io
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import pytest
from rich.console import Console

from flows.terminal.output import show_report
from flows.terminal.progress import training_progress
from tasks.progress import advance_run, log, progress_of
from tasks.reports.report import Notice, Report, Table

HOSTILE = "[red]x[/red] \x1b[2J [/nothing]"
SHOWN = "[red]x[/red] ⟨U+001B⟩[2J [/nothing]"


def shown_by(show: Callable[[Console], object], width: int = 160, **options: Any) -> str:
    """What a console shows."""
    file = io.StringIO()
    show(Console(file=file, width=width, **options))
    return file.getvalue()


def shown(report: Report, width: int = 160, **options: Any) -> str:
    return shown_by(lambda console: show_report(report, console), width, **options)


def show_progress(console: Console, body: Callable[[], object]) -> None:
    def within() -> None:
        with training_progress(console):
            body()

    copy_context().run(within)


def test_the_order_is_notices_title_tables_facts_notes() -> None:
    tables = [Table("table", [{"name": "row", "n": "1"}], note="of 2"), Table("empty", []), Table("none", [], note="-")]
    report = Report("report", [("fact", "value")], tables, [Notice("notice", ["line"]), Notice("silent", [])], ["note"])
    words = ["notice", "line", "report", "table", "name", "row", "of 2", "none: -", "fact", "value", "note"]
    text = shown(report)
    places = [text.index(word, 1) for word in words]
    assert places == sorted(places)
    assert "empty" not in text
    assert "silent" not in text


@pytest.mark.parametrize("width", [60, 80, 120, *range(130, 211, 10)])
def test_at_any_width_every_number_is_shown_in_one_piece(width: int) -> None:
    cells = {f"heading {index}": f"{index}.125 → {index}.250 (+0.125)" for index in range(6)}
    for words in ({}, {"words": "some words that fold " * 9}):
        rows = [{"name": "long " * 9, **cells, **words}, {"name": "x", **cells, **words}]
        text = " ".join(shown(Report("", tables=[Table("", rows, tuple(words))]), width).split())
        for cell in cells.values():
            assert text.count(cell) == 2


def test_all_of_it_is_data() -> None:
    table = Table(HOSTILE, [{HOSTILE: HOSTILE, "n": HOSTILE}], note=HOSTILE)
    text = shown(Report(HOSTILE, [(HOSTILE, HOSTILE)], [table], [Notice(HOSTILE, [HOSTILE])], [HOSTILE]), 400)
    assert "\x1b" not in text
    assert text.count(SHOWN) == 2 + 1 + 5 + 2 + 1


def two_stages() -> None:
    """Two stages and a line, the second stage in part."""
    progress_of("first stage", 4)(4)
    report_progress = progress_of("second stage", 8)
    report_progress(2)
    log("reward [0.5]")


TERMINAL: dict[str, Any] = {"force_terminal": True, "color_system": None}


def test_a_line_is_data() -> None:
    assert SHOWN in shown_by(lambda console: show_progress(console, lambda: log(HOSTILE)), **TERMINAL)


def test_a_log_has_the_lines_of_the_run_and_none_of_short_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown_by(lambda console: show_progress(console, two_stages)) == ""
    assert capsys.readouterr().err == "reward [0.5]\n"


def test_a_terminal_has_the_bar_of_the_running_stage() -> None:
    text = shown_by(lambda console: show_progress(console, two_stages), **TERMINAL)
    last = text.rsplit("reward [0.5]", 1)[1]
    assert ("second stage" in last, "2/8" in last, "first stage" in last) == (True, True, False)


def test_a_terminal_has_a_bar_of_the_run_with_the_time_that_is_left() -> None:
    def body() -> None:
        advance_run(1, 60, None)
        advance_run(3, 60, 65.0)

    text = shown_by(lambda console: show_progress(console, body), **TERMINAL)
    last = text.rsplit("iterations of the run", 1)[1]
    # 57 iterations of 65 s.
    assert [said in last for said in ("3/60", "65.0 s each", "1:01:45 left")] == [True] * 3
