"""Count the file-system operations of a process, and kill it right before a chosen one.

Python's audit events report each operation before it is done: between two of them nothing in a run's folder changes.
"""

import collections
import fcntl
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import Any

from tests.flows.conftest import Runs

_CHECKOUT = f"{Path(__file__).resolve().parents[2]}/"
_PACKAGES = ("flows/", "tasks/", "grpo_core/")
_NAMED = 3
_STORAGE = "tasks/storage/"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_OPERATIONS = {
    "open": "open",
    "os.mkdir": "mkdir",
    "os.rename": "rename",
    "os.remove": "remove",
    "os.rmdir": "rmdir",
    "os.truncate": "truncate",
    "os.chmod": "chmod",
    "fcntl.flock": "lock",
}


@dataclass(frozen=True)
class Operation:
    """One call to the file system.

    Attributes:
        name: kind and the project's functions that called it, innermost first, such as
            `rename: files.py:write_file_atomically < commit.py:write_manifest < commit.py:commit`; or a part of that;
            or kind and a pattern of the file's path, such as `rename */rollouts.manifest.json`.
        number: which of the operations that are meant, from 1.
    """

    name: str
    number: int


def count_operations(root: str, fatal: Operation | None) -> Mapping[str, int]:
    """Count operations from here on, and kill this process and its group before one of them.

    Args:
        root: storage root; operations below it, and those of the storage package, count.
        fatal: the operation to die before; None to survive.

    Returns:
        The number of operations of each name, updated while the process lives.
    """
    counts, fatal_seen = collections.Counter[str](), 0

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        kind = _OPERATIONS.get(event)
        if kind is None or (event == "open" and not arguments[2] & _WRITING):
            return
        stack = functions_of(sys._getframe(1))
        if not stack or not (str(arguments[0]).startswith(root) or any(f.startswith(_STORAGE) for f in stack)):
            return
        name = f"{kind}: {' < '.join(function.rpartition('/')[2] for function in stack[:_NAMED])}"
        counts[name] += 1
        target = arguments[1] if kind == "rename" else arguments[0]
        if fatal is not None and (fatal.name in name or fnmatchcase(f"{kind} {target}", fatal.name)):
            nonlocal fatal_seen
            fatal_seen += 1
            if fatal_seen == fatal.number:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(hear)
    return counts


def functions_of(frame: FrameType | None) -> list[str]:
    """Return the project's functions that are running in this frame and below, innermost first, with their files."""
    found = []
    while frame is not None:
        name = frame.f_code.co_filename.removeprefix(_CHECKOUT)
        if name.startswith(_PACKAGES):
            found.append(f"{name}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found


CUT_SHORT = "a file is missing or changed, or its writing was cut short"
_OF_A_START = ("quarantine", ".stages", ".incoming", ".lock", ".calls")


@dataclass(frozen=True)
class Golden:
    """A run that was let be.

    Attributes:
        runs: where it is.
        run: its name.
        digest: of its last policy.
    """

    runs: Runs
    run: str
    digest: str


def require_same(golden: Golden, runs: Runs, run: str, output: Path) -> None:
    """The same policy, the same values, the same files; nothing left over, and nobody who holds the run.

    Args:
        golden: the undisturbed run.
        runs: where the other one is.
        run: its name.
        output: of the start that ended.
    """
    assert summary_of(output)["policy_digest"] == golden.digest
    tables, expected = runs.tables(run), golden.runs.tables(golden.run)
    assert sorted(tables) == sorted(expected)
    assert [name for name in tables if tables[name] != expected[name]] == []
    assert files_of(runs, run) == files_of(golden.runs, golden.run)
    assert [path.name for path in runs.path(".incoming", run=run).iterdir() if path.is_dir()] == []
    assert unexplained(runs, run) == []
    assert is_free(runs.path(".lock", run=run))


def summary_of(output: Path) -> dict[str, Any]:
    """What the command line told as its last line."""
    told: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    return told


def files_of(runs: Runs, run: str) -> list[str]:
    """Every file of a run that its end determines."""
    top = runs.path(run=run)
    names = [path.relative_to(top) for path in sorted(top.rglob("*")) if path.is_file()]
    return [name.as_posix() for name in names if name.parts[0] not in _OF_A_START]


def unexplained(runs: Runs, run: str) -> list[str]:
    """What was moved away for any other reason than that its writing was cut short."""
    found = []
    for folder in runs.path("quarantine", run=run).glob("*"):
        note = folder / "reason.json"
        reason = json.loads(note.read_text())["reason"] if note.exists() else None
        # A kill between the making of the folder and the note in it leaves nothing but the folder.
        if reason != CUT_SHORT and list(folder.iterdir()):
            found.append(f"{folder.name}: {reason}")
    return found


def is_free(lock: Path) -> bool:
    """Whether nobody holds the lock, and nobody is named in it."""
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return lock.stat().st_size == 0
