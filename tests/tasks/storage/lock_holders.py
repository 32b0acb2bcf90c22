"""Locks of runs and who holds them: this process, or one that does as it is told."""

import contextlib
import contextvars
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.progress import listen
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.locks.lock_holder import this_process
from tasks.storage.locks.run_lock import RunLock, locked

REPOSITORY = Path(__file__).resolve().parents[3]
BUCKET = "memory://bucket/runs"
# Holds a place of a run and does as it is told, a word a line; says so in a line each.
HOLDER = """
import os, subprocess, sys, time
from tasks.storage.locks import lease
from tasks.storage.locks.run_lock import locked
from tasks.storage.artifacts.store import ArtifactStore
lease.RENEWAL_SECONDS, lease.LEASE_SECONDS = 0.2, float(sys.argv[3])
with locked(ArtifactStore(sys.argv[1], "run"), sys.argv[2], setting="run.name", value="run") as lock:
    print("held", flush=True)
    for line in sys.stdin:
        if line == "fork\\n":
            if os.fork() == 0:
                print("forked", flush=True)
                time.sleep(60)
        if line == "start\\n":
            print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
        if line == "require\\n":
            lock.require_held()
            print("still", flush=True)
"""


class Process:
    """The script above, in a process of its own."""

    def __init__(self, root: str, place: str = "", *, lease_seconds: float = 2.0) -> None:
        command = [sys.executable, "-c", HOLDER, root, place, str(lease_seconds)]
        self.child = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.child.pid

    def says(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def told(self, word: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{word}\n")
        self.child.stdin.flush()

    def ended(self) -> str:
        """What it said on the way out."""
        return self.child.communicate(timeout=60)[1]

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.child.communicate()


@contextlib.contextmanager
def held_elsewhere(root: str, place: str = "", *, lease_seconds: float = 2.0) -> Iterator[Process]:
    process = Process(root, place, lease_seconds=lease_seconds)
    try:
        assert process.says() == "held", process.ended()
        yield process
    finally:
        process.close()


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def advance(self, stage: str, done: int, total: int) -> None:
        pass

    def log(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The lines that people are told."""
    listener, context = Lines(), contextvars.copy_context()
    listen(listener)
    yield listener.lines
    for variable, value in context.items():
        variable.set(value)


def held(store: ArtifactStore, place: str = "") -> contextlib.AbstractContextManager[RunLock]:
    return locked(store, place, setting="run.name", value="run")


def refusal(store: ArtifactStore, place: str = "") -> str:
    with pytest.raises(InputError) as caught, held(store, place):
        pass
    assert caught.value.place == "run.name"
    return str(caught.value)


def winners(store: ArtifactStore, count: int) -> int:
    """How many of so many threads that begin at one moment get hold of it before the first lets go."""
    begin, end, got = threading.Barrier(count), threading.Barrier(count), []

    def take() -> None:
        begin.wait()
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(InputError):
                stack.enter_context(held(store))
                got.append(1)
            end.wait()

    threads = [threading.Thread(target=take) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(got)


def described_by_this_process() -> str:
    holder = this_process()
    return f"{holder.user} on {holder.host}, process {holder.pid}"
