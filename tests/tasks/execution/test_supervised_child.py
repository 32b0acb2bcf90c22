"""What a child may do to its parent: none of it hangs him or is taken for an answer, and nothing is left of it."""

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from configs.placement_sections import StorageSection
from tasks.execution import child_process as supervised
from tasks.execution.call import StageCall, StageOutcome
from tasks.execution.child_process import StageProcess
from tasks.execution.faults import LostStageError, StageCancelledError, StageTimeoutError, fault_of

CALL = StageCall(stage="collect rollouts", storage=StorageSection(), run="run", code="", arguments={})
# In the place of the child that does stages: it takes a second to start and does what it is told to.
PROGRAM = """
import json, os, signal, subprocess, sys, time
def say(kind, value, end="\\n"):
    sys.stdout.write(json.dumps({{kind: value}}) + end)
    sys.stdout.flush()
def answer(**outcome):
    say("outcome", ["{digest}", outcome])
say("ready", True)
for line in {source}:
{deeds}
"""
ERROR = {"arguments": [], "message": "m", "trace": "", "seconds": 0.0}

Child = Callable[..., StageProcess]


class Deaf:
    def advance(self, stage: str, done: int, total: int) -> None:
        """Not of interest."""

    def log(self, line: str) -> None:
        """Not of interest."""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    """Makes processes whose child does this for each call."""
    processes = []

    def make(deeds: str, source: str = "sys.stdin") -> StageProcess:
        indented = "\n".join(f"    {line}" for line in deeds.splitlines())
        program = PROGRAM.format(digest=CALL.digest, source=source, deeds=indented)
        monkeypatch.setattr(supervised, "CHILD", ("-c", program))
        processes.append(StageProcess())
        return processes[-1]

    yield make
    for process in processes:
        process.end()


def pid_of(process: StageProcess) -> int:
    assert process._child is not None
    return process._child.pid


def ask(process: StageProcess, timeout: float | None = 60.0, call: StageCall = CALL) -> StageOutcome:
    return process.carry_out(call, timeout, Deaf())


def is_gone(pid: int) -> bool:
    limit = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def test_one_that_dies_while_it_has_nothing_to_do_is_replaced(child: Child) -> None:
    process = child("answer()")
    assert ask(process).error is None
    first = pid_of(process)
    os.kill(first, signal.SIGKILL)
    assert is_gone(first)
    assert ask(process).error is None
    assert pid_of(process) != first


@pytest.mark.parametrize(
    ("deeds", "told"),
    [
        ("say('outcome', [1], end='')\nos._exit(3)", "ended with code 3"),
        ("sys.stdout.write('{\"outcome\": [')\nsys.stdout.flush()\nos.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("sys.exit('a word at the end')", "ended with code 1\na word at the end"),
    ],
    ids=["a whole value without the end of its line", "half a value", "none"],
)
def test_one_that_dies_in_the_middle_of_its_answer_has_given_none(child: Child, deeds: str, told: str) -> None:
    with pytest.raises(LostStageError, match=told):
        ask(child(deeds), None)


def test_the_end_of_what_it_said_is_told_however_much_it_was(child: Child) -> None:
    process = child("sys.stderr.write('x' * 10**7 + '\\n' + 'y\\n' * 99 + 'last')\nsys.stderr.flush()\nos._exit(1)")
    with pytest.raises(LostStageError) as raised:
        ask(process, None)
    assert str(raised.value).splitlines()[1:] == ["y"] * 29 + ["last"]


def test_what_it_started_does_not_hide_its_death(child: Child, tmp_path: Path) -> None:
    # Forked: it holds the other end of the pipe, and is in no group that is ended.
    forks = f"""
if os.fork() == 0:
    os.setsid()
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    time.sleep(300)
    os._exit(0)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)"""
    begun = time.monotonic()
    try:
        with pytest.raises(LostStageError, match="ended by SIGKILL"):
            ask(child(forks), None)
        assert time.monotonic() - begun < 30
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_what_it_started_ends_with_it(child: Child, tmp_path: Path) -> None:
    file = str(tmp_path / "pids")
    starts = f"""
pids = [subprocess.Popen(["sleep", "300"], start_new_session=own).pid for own in (False, True)]
open({file!r}, "w").write(json.dumps(pids))
time.sleep(300)"""
    with pytest.raises(StageTimeoutError, match="not done after 3 s"):
        ask(child(starts), 3.0)
    assert all(is_gone(pid) for pid in json.loads(Path(file).read_text()))


def test_one_that_reads_nothing_is_ended_in_time(child: Child) -> None:
    long = CALL.model_copy(update={"arguments": {"prompt": "x" * 10**6}})
    begun = time.monotonic()
    process = child("pass", source="[time.sleep(300)]")
    with pytest.raises(StageTimeoutError, match="not done after 1 s"):
        ask(process, 1.0, long)
    assert time.monotonic() - begun < 30


def test_one_that_closes_its_answers_and_lives_on_is_ended(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "SECONDS_TO_END", 0.2)
    process = child("say('advance', ['a stage', os.getpid(), 1])\nos.close(1)\ntime.sleep(300)")
    heard: list[int] = []

    class Noting(Deaf):
        def advance(self, stage: str, done: int, total: int) -> None:
            heard.append(done)

    with pytest.raises(LostStageError, match="does not answer any more"):
        process.carry_out(CALL, None, Noting())
    assert is_gone(heard[0])


def test_one_that_dies_before_it_is_ready_says_why(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    process = child("pass")
    monkeypatch.setattr(supervised, "CHILD", ("-c", "import no_such_package"))
    with pytest.raises(LostStageError, match=r"(?s)ended with code 1.*No module named 'no_such_package'"):
        ask(process)


def test_whoever_ends_it_from_here_has_given_the_stage_up(child: Child) -> None:
    process = child("time.sleep(300)")
    threading.Timer(1.0, process.end).start()
    with pytest.raises(StageCancelledError, match="ended from here") as raised:
        ask(process, None)
    # Else the run that was interrupted would do it again before it ends.
    assert fault_of(raised.value) is None


def test_without_file_descriptors_it_is_not_started_and_later_it_is(child: Child) -> None:
    process = child("answer()")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    # One file for what it says is to be had, and no pipe.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            ask(process)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert ask(process).error is None


@pytest.mark.parametrize(
    ("kind", "fault", "kept"),
    [
        ("InputError", None, True),
        ("ConnectionResetError", "storage", True),
        ("RuntimeError", None, False),
    ],
)
def test_after_an_error_that_nobody_foresaw_the_next_stage_has_a_process_of_its_own(
    child: Child, kind: str, fault: str | None, kept: bool
) -> None:
    process = child(f"answer(error={ERROR | {'kind': kind}!r}, fault={fault!r}, reasons=[str(os.getpid())])")
    first, second = ask(process), ask(process)
    assert first.error is not None
    assert first.error.kind == kind
    assert (first.reasons == second.reasons) is kept


def test_an_interrupt_in_the_terminal_is_not_for_it(child: Child) -> None:
    process = child("answer()")
    ask(process)
    # The terminal interrupts the group that is in the foreground, this process's own.
    assert os.getpgid(pid_of(process)) == os.getsid(pid_of(process)) == pid_of(process)
