import io
from contextvars import copy_context

import pytest
from rich.console import Console

from flows.terminal.progress import training_progress
from tasks.progress import advance_run, log, progress_of


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


def test_a_log_has_one_line_per_finished_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(Console(file=io.StringIO())) == ""
    stage, line = capsys.readouterr().err.splitlines()
    assert stage.startswith("first stage: 4/4 in ")
    assert line == "reward [0.5]"


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
