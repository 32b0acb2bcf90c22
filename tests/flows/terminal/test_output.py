"""A report in the terminal: its order, numbers in one piece at any width, and data that commands nothing."""

import io
from contextvars import copy_context

import pytest
from rich.console import Console

from flows.terminal.output import show_report
from flows.terminal.progress import training_progress
from tasks.progress import advance_run, log, progress_of
from tasks.reports.report import Notice, Report, Table

HOSTILE = "[red]x[/red] \x1b[2J [/nothing]"
SHOWN = "[red]x[/red] ⟨U+001B⟩[2J [/nothing]"


def shown(report: Report, width: int = 160, **options: bool) -> str:
    console = Console(file=io.StringIO(), width=width, **options)  # type: ignore[arg-type]
    show_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


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


def test_a_problem_has_a_colour() -> None:
    text = shown(Report("", notes=["ok      fonts", "problem disk"]), force_terminal=True)
    assert "\x1b[32mok\x1b[0m" in text
    assert "\x1b[31mproblem\x1b[0m" in text


def printed(console: Console) -> str:
    """What a console shows after two stages and a line, and the first part of a third."""

    def body() -> None:
        with training_progress(console):
            progress_of("first stage", 4)(4)
            report_progress = progress_of("second stage", 8)
            report_progress(2)
            log("reward [0.5]")

    copy_context().run(body)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_has_the_lines_of_the_run_and_none_of_short_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(Console(file=io.StringIO())) == ""
    assert capsys.readouterr().err == "reward [0.5]\n"


def test_a_terminal_has_the_bar_of_the_running_stage() -> None:
    text = printed(Console(file=io.StringIO(), width=160, force_terminal=True, color_system=None))
    last = text.rsplit("reward [0.5]", 1)[1]
    assert "second stage" in last
    assert "2/8" in last
    assert "first stage" not in last


def test_a_terminal_has_a_bar_of_the_run_with_the_time_that_is_left() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system=None)

    def body() -> None:
        with training_progress(console):
            advance_run(1, 60, None)
            advance_run(3, 60, 65.0)

    copy_context().run(body)
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().rsplit("iterations of the run", 1)[1]
    assert "3/60" in last
    assert "65.0 s each" in last
    # 57 iterations of 65 s.
    assert "1:01:45 left" in last
