"""A child process: whatever it does, its parent neither hangs nor takes a wrong answer, and nothing is left of it."""

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

from configs.placement import PlacementSection
from configs.scoring import RewardSection
from grpo_core.errors import InputError
from tasks.execution import child_process
from tasks.execution.call import StageCall, StageOutcome, call_of, carry_out_in
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcess, ChildProcesses
from tasks.execution.errors import LostStageError, RemoteStageError, StageCancelledError, StageTimeoutError
from tasks.execution.stage import stage_named
from tasks.progress import listen
from tasks.rollouts.collect_rollouts import collect_rollouts_task
from tasks.runs.layout import SCORES_FILE
from tasks.storage.artifacts.store import ArtifactStore
from tests.processes import ProgressLog
from tests.tasks.execution.test_dispatch import reward_arguments, rollout_arguments
from tests.tasks.update.update_jobs import IMAGES

LOCAL_PLACEMENT = PlacementSection(devices="cpu")
FUNCTIONS = Path(__file__).parent / "functions.py"
# A child in the place of the real one, whose imports take many seconds.
PROGRAM = """
import json, os, signal, subprocess, sys, time
def say(kind, value, end="\\n"):
    sys.stdout.write(json.dumps({{kind: value}}) + end)
    sys.stdout.flush()
def answer(value=None):
    say("outcome", value)
say("ready", True)
for line in {source}:
{deeds}
"""


Child = Callable[..., ChildProcess]


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    monkeypatch.setattr(child_process, "SECONDS_BETWEEN_CHECKS", 0.05)
    processes = []

    def make(deeds: str, source: str = "sys.stdin") -> ChildProcess:
        indented = "\n".join(f"    {line}" for line in deeds.splitlines())
        processes.append(ChildProcess(("-c", PROGRAM.format(source=source, deeds=indented))))
        return processes[-1]

    yield make
    for process in processes:
        process.end()


def child_of(process: ChildProcess) -> psutil.Process:
    return psutil.Process(process._child.pid)


def ask(process: ChildProcess, timeout: float | None = 60.0, payload: object = None) -> Any:
    return process.request("a stage", payload, timeout, ProgressLog())


def is_gone(pid: int) -> bool:
    limit = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def test_one_that_dies_between_requests_is_replaced(child: Child) -> None:
    process = child("answer(os.getpid())")
    first = ask(process)
    assert ask(process) == first
    os.kill(first, signal.SIGKILL)
    assert is_gone(first)
    assert ask(process) != first


@pytest.mark.parametrize(
    ("deeds", "message"),
    [
        ("say('outcome', 1, end='')\nos._exit(3)", "ended with code 3"),
        ("sys.stdout.write('{\"outcome\": [')\nsys.stdout.flush()\nos.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("sys.exit('a word at the end')", "ended with code 1\na word at the end"),
    ],
    ids=["a value without the end of its line", "half a value", "none"],
)
def test_death_in_the_middle_of_an_answer_gives_none(child: Child, deeds: str, message: str) -> None:
    with pytest.raises(LostStageError, match=message):
        ask(child(deeds), None)


def test_the_end_of_its_standard_error_is_in_the_message(child: Child) -> None:
    process = child("sys.stderr.write('x' * 10**7 + '\\n' + 'y\\n' * 99 + 'last')\nsys.stderr.flush()\nos._exit(1)")
    with pytest.raises(LostStageError) as raised:
        ask(process, None)
    assert str(raised.value).splitlines()[1:] == ["y"] * 29 + ["last"]


def test_its_death_is_seen_though_a_grandchild_keeps_the_pipe_open(child: Child, tmp_path: Path) -> None:
    # Forked: it has the other end of the pipe, and is in no group that is killed.
    forks = f"""
if os.fork() == 0:
    os.setsid()
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    time.sleep(300)
    os._exit(0)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)"""
    try:
        with pytest.raises(LostStageError, match="ended by SIGKILL"):
            ask(child(forks), 60.0)
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_what_it_started_is_killed_with_it(child: Child, tmp_path: Path) -> None:
    file = str(tmp_path / "pids")
    starts = f"""
pids = [subprocess.Popen(["sleep", "300"], start_new_session=own).pid for own in (False, True)]
open({file!r}, "w").write(json.dumps(pids))
time.sleep(300)"""
    with pytest.raises(StageTimeoutError):
        ask(child(starts), 3.0)
    assert all(is_gone(pid) for pid in json.loads(Path(file).read_text()))


def test_one_that_reads_nothing_runs_into_the_timeout(child: Child) -> None:
    with pytest.raises(StageTimeoutError):
        ask(child("pass", source="[time.sleep(300)]"), 1.0, "x" * 10**6)


@pytest.mark.parametrize(
    ("deeds", "timeout", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", 1.0, StageTimeoutError),
        ("os.close(1)\ntime.sleep(300)", None, LostStageError),
    ],
    ids=["stopped", "closed its output"],
)
def test_one_that_can_give_no_answer_is_killed(
    child: Child, monkeypatch: pytest.MonkeyPatch, deeds: str, timeout: float | None, error: type[Exception]
) -> None:
    monkeypatch.setattr(child_process, "SECONDS_TO_END", 0.2)
    log = ProgressLog()
    with pytest.raises(error):
        child(f"say('log', os.getpid())\n{deeds}").request("a stage", None, timeout, log)
    assert is_gone(int(log.lines[0]))


def test_one_that_dies_before_it_is_ready_says_why() -> None:
    with pytest.raises(LostStageError, match=r"(?s)ended with code 1.*No module named 'no_such_package'"):
        ask(ChildProcess(("-c", "import no_such_package")))


def test_ending_it_cancels_the_request(child: Child) -> None:
    process = child("time.sleep(300)")
    threading.Timer(1.0, process.end).start()
    with pytest.raises(StageCancelledError):
        ask(process, None)


def test_an_interrupted_request_leaves_no_answer_for_the_next(child: Child) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    process = child("request = json.loads(line)\nsay('advance', ['a stage', 1, 2])\nanswer(request)")
    with pytest.raises(KeyboardInterrupt):
        process.request("a stage", "first", None, ProgressLog(interrupt))
    assert ask(process, None, "second") == "second"


def test_of_threads_that_ask_at_once_each_gets_its_own_answer(child: Child) -> None:
    process, found = child("answer(json.loads(line))"), dict[int, Any]()

    def request(number: int) -> None:
        found[number] = ask(process, None, number)

    threads = [threading.Thread(target=request, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number for number in range(8)}


def test_without_file_descriptors_it_is_not_started_and_later_it_is(child: Child) -> None:
    process = child("answer(1)")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    # One file for its standard error can be opened, and no pipe.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            ask(process)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert ask(process) == 1


ERROR = {"arguments": ["a", 1, "hint"], "message": "m", "trace": "", "seconds": 0.0}


@pytest.mark.parametrize(
    ("record", "raised", "kept"),
    [
        (ERROR | {"kind": "InputError"}, InputError, True),
        (ERROR | {"kind": "ConnectionResetError", "retryable": "storage"}, RemoteStageError, True),
        (ERROR | {"kind": "RuntimeError"}, RemoteStageError, False),
    ],
)
@pytest.mark.parametrize("way", ["error", "outcome"])
def test_after_an_unforeseen_error_the_next_request_has_a_new_child(
    child: Child, record: dict[str, Any], raised: type[Exception], kept: bool, way: str
) -> None:
    if way == "error":
        process = child(f"say('error', {record!r})")
        with pytest.raises(raised):
            ask(process)
    else:
        process = child(f"answer(dict(error={record!r}))")
        call = StageCall(stage="a stage", storage={"root": "r"}, run="run", roots=(), code="", arguments={})
        with pytest.raises(raised):
            carry_out_in(process, call, None).reference()
    assert (process._child is not None) is kept


def test_an_interrupt_in_the_terminal_does_not_reach_it(child: Child) -> None:
    # The terminal interrupts the group that is in the foreground, this process's own.
    pid = ask(child("answer(os.getpid())"))
    assert os.getpgid(pid) == os.getsid(pid) == pid


def test_idle_children_are_lent_again_and_all_are_ended() -> None:
    children, command = ChildProcesses(), ("-c", PROGRAM.format(source="sys.stdin", deeds="    answer(os.getpid())"))
    with children.borrow("group", "a", command) as one, children.borrow("group", "b", command) as two:
        pids = ask(one), ask(two)
    with children.borrow("group", "b", command) as again, children.borrow("other", "b", command) as other:
        assert again is two
        assert other not in (one, two)
    children.close()
    assert all(is_gone(pid) for pid in pids)


# --- the real child


@pytest.fixture(scope="module")
def stages() -> Iterator[ChildProcess]:
    # As on a machine whose locale has only the letters of English.
    process = ChildProcess(child_command("stage"), {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    yield process
    process.end()


def collecting(store: ArtifactStore, folder: str) -> StageCall:
    return call_of(stage_named("collect rollouts"), rollout_arguments(folder, LOCAL_PLACEMENT), store)


def scoring(store: ArtifactStore, function: str) -> StageCall:
    section = RewardSection(reward="function", settings={"function": f"{FUNCTIONS}:{function}"})
    return call_of(stage_named("score reward"), reward_arguments(IMAGES.collect(), section, title="第一"), store)


def carry_out(
    process: ChildProcess, call: StageCall, timeout: float | None = None, log: ProgressLog | None = None
) -> StageOutcome:
    listen(log or ProgressLog())
    return carry_out_in(process, call, timeout)


@pytest.mark.slow
def test_the_same_artifact_and_one_load_for_several_stages(stages: ChildProcess, store: ArtifactStore) -> None:
    log = ProgressLog()
    first = carry_out(stages, collecting(store, "one"), 300.0, log).reference()
    child = child_of(stages)
    second = carry_out(stages, collecting(store, "two"), None, log).reference()
    assert child_of(stages) == child
    assert [line.startswith("loaded ") for line in log.lines] == [True]
    here = collect_rollouts_task.fn(**rollout_arguments("three", LOCAL_PLACEMENT))
    assert first.digest == second.digest == here.digest
    assert store.find("one/rollouts") == first


def half_written(store: ArtifactStore) -> list[Path]:
    store.clear_abandoned()
    return [path for path in Path(store.path(".incoming")).iterdir() if path.is_dir()]


@pytest.mark.slow
def test_a_killed_child_leaves_nothing_half_and_is_replaced(stages: ChildProcess, store: ArtifactStore) -> None:
    carry_out(stages, collecting(store, "before"))
    child = child_of(stages)
    with pytest.raises(LostStageError, match="ended by SIGKILL; the machine's memory may have run out"):
        carry_out(stages, collecting(store, "one"), log=ProgressLog(child.kill))
    assert store.find("one/rollouts") is None
    assert half_written(store) == []
    assert carry_out(stages, collecting(store, "one")).reference() == store.find("one/rollouts")


@pytest.mark.slow
def test_a_timeout_in_the_middle_of_the_commit_leaves_nothing_half(stages: ChildProcess, store: ArtifactStore) -> None:
    carry_out(stages, collecting(store, "before"))
    with store.commit_lock(), pytest.raises(StageTimeoutError):
        # The child has its files staged, and waits for the lock under which they become an artifact.
        carry_out(stages, collecting(store, "late"), 20.0)
    assert half_written(store) == []
    assert store.find("late/rollouts") is None
    assert carry_out(stages, collecting(store, "late")).reference() == store.find("late/rollouts")
    assert not Path(store.path("quarantine")).exists()


@pytest.mark.slow
def test_what_a_reward_prints_is_no_answer(stages: ChildProcess, store: ArtifactStore) -> None:
    log = ProgressLog()
    made = carry_out(stages, scoring(store, "prints_everywhere"), 600.0, log).reference()
    assert log.stages == {"第一: score prints_everywhere"}
    values = pl.read_parquet(store.local_files(made) / SCORES_FILE)["value"]
    assert values.to_list() == [len(prompt) for prompt in IMAGES.prompts for _ in range(4)]


@pytest.mark.slow
def test_a_child_and_what_its_stage_has_started_end_with_the_parent(store: ArtifactStore) -> None:
    process = ChildProcess(child_command("stage"))
    carry_out(process, collecting(store, "before"))
    child, started = child_of(process), list[psutil.Process]()

    def leave() -> None:
        limit = time.monotonic() + 300
        while not started and time.monotonic() < limit:
            started.extend(each for each in child.children(recursive=True) if each.name() == "sleep")
            time.sleep(0.05)
        # As the kernel does for a parent that was killed.
        process._child.stdin.close()

    watching = threading.Thread(target=leave)
    watching.start()
    with pytest.raises(LostStageError, match="ended by SIGKILL"):
        carry_out(process, scoring(store, "starts_a_server"))
    watching.join()
    process.end()
    assert started
    assert not psutil.wait_procs([child, *started], 10)[1]
