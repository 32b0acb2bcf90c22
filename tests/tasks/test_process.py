"""Objects made while garbage collection is paused, where pages of docs/ are, and lines of a log on a set clock."""

import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks import progress
from tasks.process import CHECKOUT, collection_paused, environment, openable
from tasks.progress import Lines
from tasks.runs.signs import SIGNS, Sign


class _Node:
    def __init__(self) -> None:
        self.itself = self


_PROGRAM = """
import gc
from tasks.process import collection_paused

with collection_paused():
    made = [[]]
print([gc.is_tracked(made), any(each is made for each in gc.get_objects(generation=2)), gc.get_freeze_count()])
"""


def test_what_a_pause_made_waits_in_the_oldest_generation() -> None:
    # In a process of its own, since the tests' objects are frozen.
    output = subprocess.check_output([sys.executable, "-c", _PROGRAM], env=environment(), text=True)
    assert output == "[True, True, 0]\n"


def test_garbage_of_a_pause_is_collected_later_and_inner_pauses_end_none() -> None:
    with collection_paused():
        made = weakref.ref(_Node())
    assert made() is not None
    gc.collect()
    assert made() is None
    with collection_paused():
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_page_of_every_sign_can_be_opened_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (CHECKOUT, CHECKOUT / "docs", tmp_path):
        monkeypatch.chdir(folder)
        for name in SIGNS:
            page, _, anchor = openable(str(Sign(name, 1, "x"))).rpartition("(")[2].rstrip(")").partition("#")
            assert Path(page).is_file()
            assert anchor == name
    assert openable("my/docs/operations.md") == "my/docs/operations.md"


Log = Callable[[float, Callable[[Lines], None]], list[str]]


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Log:
    """Does something with the lines so many seconds later, and returns what they printed, without the seconds."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    lines = Lines()

    def call(seconds: float, act: Callable[[Lines], None]) -> list[str]:
        now[0] += seconds
        act(lines)
        return capsys.readouterr().err.splitlines()

    return call


def test_a_stage_of_less_than_half_a_minute_has_no_line(after: Log) -> None:
    assert after(0, lambda lines: lines.advance("score", 0, 8)) == []
    assert after(29, lambda lines: lines.advance("score", 4, 8)) == []
    assert after(0.9, lambda lines: lines.advance("score", 8, 8)) == []


def test_a_longer_stage_has_a_line_every_half_minute_and_one_at_its_end(after: Log) -> None:
    after(0, lambda lines: lines.advance("score", 0, 8))
    assert after(31, lambda lines: lines.advance("score", 1, 8)) == ["score: 1/8 in 31.0 s"]
    assert after(29, lambda lines: lines.advance("score", 2, 8)) == []
    assert after(2, lambda lines: lines.advance("score", 3, 8)) == ["score: 3/8 in 62.0 s"]
    assert after(1, lambda lines: lines.advance("score", 8, 8)) == ["score: 8/8 in 63.0 s"]
    # Another one of that title begins anew.
    for seconds in (0, 40):
        after(seconds, lambda lines: lines.advance("score", 0, 8))
        assert after(20, lambda lines: lines.advance("score", 8, 8)) == []


def test_many_short_iterations_have_a_line_every_half_minute_unless_there_was_another(after: Log) -> None:
    shown = [after(7, lambda lines, done=done: lines.advance_run(done, 20, 7.0)) for done in range(1, 11)]
    found = [re.match(r"\d+/20", line)[0] for each in shown for line in each]
    # After 35 and 70 seconds.
    assert found == ["5/20", "10/20"]
    after(20, lambda lines: lines.log("reward 0.5"))
    assert after(20, lambda lines: lines.advance_run(11, 20, 7.0)) == []
