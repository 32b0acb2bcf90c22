"""Where a process is: its stacks in a mapped file, which is whole whenever the process is killed.

A thread writes them every few milliseconds. Python's audit events tell of each operation on the file system before it
is done, so a process can also be killed right at one: between two of them nothing of a run's folder changes.
"""

import collections
import json
import mmap
import os
import signal
import struct
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

SECONDS_BETWEEN_LOOKS = 0.004
_CHECKOUT = f"{Path(__file__).resolve().parents[2]}/"
_PACKAGES = ("flows/", "tasks/", "grpo_core/")
_SLOT = 1 << 15
_NAMED = 3
_HEADER = struct.Struct("<QII")
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
        name: what it is, by the project's functions that made it, the innermost first, such as
            `rename: files.py:write_file_atomically < store.py:_write_manifest < store.py:commit`; or a part of that.
        number: which one of those that have this in their name, from 1.
    """

    name: str
    number: int


@dataclass(frozen=True)
class Sight:
    """What a process was doing.

    Attributes:
        stacks: of the main thread and then of all others, functions of the project, the innermost first.
        operation: before which it was killed; None for a moment between.
    """

    stacks: tuple[tuple[str, ...], ...]
    operation: str | None


class Trail:
    """The mapped file as the process writes it: two slots in turn, so that one is whole at any time."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(2 * _SLOT)
            self._map = mmap.mmap(file.fileno(), 2 * _SLOT)
        self._count = 0
        self._writing = threading.Lock()

    def write(self, stacks: list[list[str]], operation: str | None) -> None:
        content = json.dumps([stacks, operation]).encode()[: _SLOT - _HEADER.size]
        with self._writing:
            self._count += 1
            start = _SLOT * (self._count % 2)
            header = _HEADER.pack(self._count, len(content), zlib.crc32(content))
            self._map[start : start + _HEADER.size + len(content)] = header + content


def read_sight(path: Path) -> Sight:
    """The last thing that is whole; nothing at all where the process had not come to its first look."""
    content = path.read_bytes() if path.exists() else b""
    found: list[tuple[int, bytes]] = []
    for start in (0, _SLOT):
        slot = content[start : start + _SLOT]
        if len(slot) == _SLOT:
            count, length, checksum = _HEADER.unpack_from(slot)
            text = slot[_HEADER.size : _HEADER.size + length]
            if count and zlib.crc32(text) == checksum:
                found.append((count, text))
    if not found:
        return Sight((), None)
    stacks, operation = json.loads(max(found)[1])
    return Sight(tuple(tuple(stack) for stack in stacks), operation)


def leave_trail(path: Path, root: str, fatal: Operation | None) -> Mapping[str, int]:
    """Write a trail from now on, and die at an operation where that is asked for.

    Args:
        path: of the trail.
        root: the storage root, below which operations count.
        fatal: before which this process kills itself and its group.

    Returns:
        How many operations of each name there have been, kept up to date.
    """
    trail, counts, fatal_seen = Trail(path), collections.Counter[str](), 0
    threading.Thread(target=_look, args=(trail,), daemon=True).start()

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
                trail.write(_stacks(stack), name)
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(hear)
    return counts


def _look(trail: Trail) -> None:
    own = threading.get_ident()
    while True:
        trail.write(_stacks(None, but=own), None)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _stacks(present: list[str] | None, but: int | None = None) -> list[list[str]]:
    """The main thread's stack first; `present` is the calling thread's, if it is one of them."""
    main, caller = threading.main_thread().ident, threading.get_ident()
    frames = sys._current_frames()
    stacks = {thread: _functions(frame) for thread, frame in frames.items() if thread != but}
    if present is not None:
        stacks[caller] = present
    first = [stacks.pop(main)] if main in stacks else [[]]
    return first + [stack for stack in stacks.values() if stack]


def _functions(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_CHECKOUT):
            name = file.removeprefix(_CHECKOUT)
            if name.startswith(_PACKAGES):
                found.append(f"{name}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found
