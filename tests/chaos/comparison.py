"""What a run that was killed must have in common with one that was not, and what it must not have."""

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.flows.conftest import Runs

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
