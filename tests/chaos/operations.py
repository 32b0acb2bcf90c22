"""Count the file-system operations of a process, and kill it right before a chosen one.

Python's audit events report each operation before it is done: between two of them nothing in a run's folder changes.
"""

import collections
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

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
            `rename: files.py:write_file_atomically < commit.py:write_manifest < commit.py:commit`; or a part of that.
        number: which of the operations whose name contains this, from 1.
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
        stack = _functions(sys._getframe(1))
        if not stack or not (str(arguments[0]).startswith(root) or any(f.startswith(_STORAGE) for f in stack)):
            return
        name = f"{kind}: {' < '.join(function.rpartition('/')[2] for function in stack[:_NAMED])}"
        counts[name] += 1
        if fatal is not None and fatal.name in name:
            nonlocal fatal_seen
            fatal_seen += 1
            if fatal_seen == fatal.number:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(hear)
    return counts


def _functions(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        name = frame.f_code.co_filename.removeprefix(_CHECKOUT)
        if name.startswith(_PACKAGES):
            found.append(f"{name}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found
