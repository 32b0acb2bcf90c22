"""Locks of runs and who holds them: this process, or one that obeys."""

import contextlib
import contextvars
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from grpo_core.errors import InputError
from tasks.progress import listen
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.run_lock import RunLock, locked
from tests.processes import ProgressLog
from tests.tasks.storage.made_artifacts import root_url

# Locks a run and obeys one word a line; answers with a line each.
HOLDER = """
import os, subprocess, sys, time
from tasks.storage import lease
from tasks.storage.run_lock import locked
from tasks.storage.artifacts.store import ArtifactStore
lease.RENEWAL_SECONDS, lease.LEASE_SECONDS = 0.2, 600.0
with locked(ArtifactStore(sys.argv[1], "run"), setting="run.name", value="run") as lock:
    print("held", flush=True)
    for line in sys.stdin:
        if line == "fork\\n":
            if os.fork() == 0:
                print("forked", flush=True)
                time.sleep(600)
        if line == "start\\n":
            print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
        if line == "require\\n":
            lock.require_held()
            print("still", flush=True)
"""


class Process:
    """The script above, in a process of its own."""

    def __init__(self, root: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.child.pid

    def read(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def say(self, word: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{word}\n")
        self.child.stdin.flush()

    def ask(self, word: str) -> str:
        self.say(word)
        return self.read()

    def ended(self) -> str:
        """What it wrote on the way out."""
        return self.child.communicate(timeout=120)[1]

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.child.communicate()


@contextlib.contextmanager
def held_elsewhere(store: ArtifactStore) -> Iterator[Process]:
    process = Process(root_url(store))
    try:
        assert process.read() == "held", process.ended()
        yield process
    finally:
        process.close()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines that are logged."""
    listener, context = ProgressLog(), contextvars.copy_context()
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
