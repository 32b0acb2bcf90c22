"""A lock in a bucket: a lease that its holder renews, in one object for each time that it was taken.

`.lock/000001`, `.lock/000002`, ...: the highest number holds. Each object is made on the condition that it is not there
yet, so of two that want the next number one gets it, and whoever slept through the loss of its lease renews an object
that no longer counts, never another's. Clocks of two machines are not compared: a lease is stale when the one that
wants it has seen no renewal for the lease time.
"""

import contextlib
import json
import threading
import time
from typing import Any

from fsspec import AbstractFileSystem

from tasks.progress import log
from tasks.storage.filesystem.failures import is_conflict
from tasks.storage.locks.lock_holder import Holder, described_holder

RENEWAL_SECONDS, LEASE_SECONDS = 5.0, 60.0
_FRESH = 3
"""Renewals that may be late before a holder asks whether it still holds."""

_RELEASED = b'{"released": true}'


class Lease:
    """One hold of a lease, renewed by a thread until it is released.

    Attributes:
        previous: the holder that ended without releasing it, if the one before did.
    """

    def __init__(
        self, filesystem: AbstractFileSystem, folder: str, number: int, holder: Holder, previous: Holder | None
    ) -> None:
        self.previous = previous
        self._filesystem, self._folder, self._number, self._holder = filesystem, folder, number, holder
        self._ended = threading.Event()
        self._loss: str | None = None
        self._fault: Exception | None = None
        self._renewed = _now()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        count = 0
        while not self._ended.wait(RENEWAL_SECONDS):
            count, begun = count + 1, _now()
            try:
                self._loss = self._look()
                if self._loss is not None:
                    return
                self._filesystem.pipe_file(_object(self._folder, self._number), _held(self._holder, count))
                self._renewed, self._fault = begun, None
            except Exception as error:
                # The clients of buckets raise errors of many kinds, and most pass by; if the lease does not outlive it,
                # the next stage is told.
                self._fault = error

    def find_loss(self) -> str | None:
        """Why the lease is no longer held; None while it is."""
        # A lease that was renewed a moment ago is nobody else's; only one who slept has to ask.
        if self._loss is None and _now() - self._renewed > _FRESH * RENEWAL_SECONDS:
            self._loss = self._look()
        return self._loss

    def _look(self) -> str | None:
        highest = max(_numbers(self._filesystem, self._folder), default=0)
        if highest == self._number and self._is_own():
            return None
        if highest < self._number:
            return "its lock was removed while it was being written"
        holder, cause = _describing(_read(self._filesystem, self._folder, highest)), self._fault
        because = f" ({type(cause).__name__}: {cause})" if cause else ""
        return f"this process did not renew its hold for {LEASE_SECONDS:.0f} s{because}, and it was taken by {holder}"

    def release(self) -> None:
        """Let others take it; afterwards the object names nobody."""
        self._ended.set()
        self._thread.join()
        try:
            if self._is_own():
                self._filesystem.pipe_file(_object(self._folder, self._number), _RELEASED)
        except Exception as error:
            # The work is over, or failed with an error that must not give way to this one; the lease grows stale.
            self._fault = error

    def _is_own(self) -> bool:
        holder = _holder(_read(self._filesystem, self._folder, self._number))
        return holder is not None and holder.token == self._holder.token


def take_lease(filesystem: AbstractFileSystem, folder: str, holder: Holder) -> Lease | str:
    """Take the lease, or tell who holds it; waits while it is not known whether the holder lives.

    Args:
        filesystem: of the bucket.
        folder: of the lease's objects.
        holder: this process.
    """
    number = max(_numbers(filesystem, folder), default=0)
    content = _read(filesystem, folder, number) if number else _RELEASED
    if content != _RELEASED and not _is_stale(filesystem, folder, number, content):
        return _describing(_read(filesystem, folder, number))
    if not _create(filesystem, folder, number + 1, holder):
        return _describing(_read(filesystem, folder, number + 1))
    highest = max(_numbers(filesystem, folder), default=0)
    if highest > number + 1:
        # Others took it and removed this number while this process slept between looking and taking; the next of them
        # may remove what this one made.
        with contextlib.suppress(FileNotFoundError):
            filesystem.rm_file(_object(folder, number + 1))
        return _describing(_read(filesystem, folder, highest))
    for lower in _numbers(filesystem, folder):
        if lower <= number:
            filesystem.rm_file(_object(folder, lower))
    previous = None if content == _RELEASED else _holder(content)
    return Lease(filesystem, folder, number + 1, holder, previous)


def _is_stale(filesystem: AbstractFileSystem, folder: str, number: int, content: bytes) -> bool:
    holder = _holder(content)
    if holder is not None and holder.is_gone:
        return True
    log(f"held by {_describing(content)}; looking for up to {LEASE_SECONDS:.0f} s whether it lives")
    until = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < until:
        time.sleep(min(1.0, RENEWAL_SECONDS))
        seen = _read(filesystem, folder, number)
        if seen == _RELEASED:
            return True
        if seen != content:
            return False
    return True


def _create(filesystem: AbstractFileSystem, folder: str, number: int, holder: Holder) -> bool:
    content = _held(holder, 0)
    try:
        filesystem.pipe_file(_object(folder, number), content, mode="create")
    except OSError as error:
        if not is_conflict(error):
            raise
        # A request that was sent again after its answer was lost finds what it made itself.
        return _read(filesystem, folder, number) == content
    return True


def _now() -> float:
    """Seconds that also pass while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _object(folder: str, number: int) -> str:
    return f"{folder}/{number:06d}"


def _numbers(filesystem: AbstractFileSystem, folder: str) -> list[int]:
    try:
        paths: list[str] = filesystem.ls(folder, detail=False, refresh=True)
    except FileNotFoundError:
        return []
    names = [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]
    return [int(name) for name in names if name.isdigit()]


def _read(filesystem: AbstractFileSystem, folder: str, number: int) -> bytes:
    """The object's content; nothing where it was removed in the meantime."""
    try:
        content: bytes = filesystem.cat_file(_object(folder, number))
    except FileNotFoundError:
        return b""
    return content


def _held(holder: Holder, count: int) -> bytes:
    return json.dumps({"holder": holder.model_dump(), "count": count}, indent=1).encode()


def _holder(content: bytes) -> Holder | None:
    try:
        described: Any = json.loads(content)
    except ValueError:
        return None
    held = described.get("holder") if isinstance(described, dict) else None
    return described_holder(json.dumps(held).encode())


def _describing(content: bytes) -> str:
    return str(_holder(content) or "another process, which has not said who it is")
