"""The lines of a log, on a clock that the test sets."""

import re
from collections.abc import Callable

import pytest

from tasks import progress
from tasks.progress import Lines

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


def test_a_stage_of_the_same_title_begins_anew(after: Log) -> None:
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
