"""The holder of a lock, and a lock in a bucket: a lease that its holder renews, with one object each time it was taken.

`.lock/000001`, `.lock/000002`, ...: the highest number has the lock. Each object is created on the condition that it
does not exist, so only one of two processes gets the next number, and one that slept through the loss of its lease
renews an object that has no effect. Clocks of two machines are never compared: a lease is stale once the process
that wants it has seen no renewal for LEASE_SECONDS.
"""

import contextlib
import getpass
import json
import os
import shlex
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import psutil
from fsspec import AbstractFileSystem
from pydantic import BaseModel, ConfigDict

from tasks.storage.roots import is_conflict, require_exclusive_create

RENEWAL_SECONDS, LEASE_SECONDS = 5.0, 60.0
_FRESH = 3  # number of late renewals after which a holder checks whether it still has the lease
_POLL_SECONDS = 0.5
_CLOCK_SECONDS = 2.0  # tolerance between two readings of a process's start, since the clock may be set in between
_MAX_COMMAND = 200
_RELEASED = b'{"released": true}'


class Holder(BaseModel):
    """A process that has a lock, since a time in UTC, with its shortened command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str  # identifies this acquisition of the lock
    user: str
    host: str
    machine: str  # boot and process namespace, within which a process id means one process; empty if unknown
    pid: int
    started: float  # start of the process, seconds since 1970
    since: str
    command: str

    def __str__(self) -> str:
        return f"{self.user} on {self.host}, process {self.pid}, since {self.since} ({self.command})"

    @property
    def is_gone(self) -> bool:
        """Whether its process certainly ended; a process of another machine or container counts as alive."""
        if not self.machine or self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            return abs(process.create_time() - self.started) > _CLOCK_SECONDS
        except psutil.NoSuchProcess:
            return True


def this_process() -> Holder:
    """Describe this process as a holder from this moment on."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # The user of a container may have no name.
        user = f"user {os.getuid()}"
    return Holder(
        token=uuid.uuid4().hex,
        user=user,
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        command=command if len(command) <= _MAX_COMMAND else f"{command[:_MAX_COMMAND]} ...",
    )


def read_holder(content: bytes) -> Holder | None:
    """Read the holder from the content of a locked file or of a lease; None if there is none, or it is damaged."""
    try:
        described = json.loads(content)
        return Holder.model_validate(described.get("holder", described))
    except (ValueError, AttributeError, RecursionError):
        return None


def holder_name(holder: Holder | None) -> str:
    """Return the holder of a lock as messages show it."""
    return str(holder or "another process, which has not written its name")


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class _Objects:
    """The numbered objects of one lease."""

    def __init__(self, filesystem: AbstractFileSystem, folder: str) -> None:
        self.filesystem, self.folder = filesystem, folder

    def numbers(self) -> list[int]:
        try:
            paths: list[str] = self.filesystem.ls(self.folder, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]
        return sorted(int(name) for name in names if name.isdigit())

    @property
    def highest(self) -> int:
        return max(self.numbers(), default=0)

    def path(self, number: int) -> str:
        return f"{self.folder}/{number:06d}"

    def read(self, number: int) -> bytes:
        """Read an object; empty if it was removed meanwhile."""
        try:
            content: bytes = self.filesystem.cat_file(self.path(number))
        except FileNotFoundError:
            return b""
        return content

    def holder(self, number: int) -> Holder | None:
        return read_holder(self.read(number))

    def create(self, number: int, content: bytes) -> bool:
        """Write an object that does not exist; False if it does."""
        try:
            self.filesystem.pipe_file(self.path(number), content, mode="create")
        except OSError as error:
            if not is_conflict(error):
                raise
            # A request that was repeated after its response was lost finds its own object.
            return self.read(number) == content
        return True

    def remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(self.path(number))


class Lease:
    """A lease that this process has, renewed by a thread until it is released; `previous` did not release it."""

    def __init__(self, objects: _Objects, number: int, holder: Holder, previous: Holder | None) -> None:
        self.previous = previous
        self._objects, self._number, self._holder = objects, number, holder
        self._ended = threading.Event()
        self._loss: str | None = None
        self._failure: Exception | None = None
        self._renewed = _now()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        count = 0
        while not self._ended.wait(RENEWAL_SECONDS):
            count, begun = count + 1, _now()
            try:
                self._loss = self._check()
                if self._loss is not None:
                    return
                self._write(_held(self._holder, count))
                self._renewed, self._failure = begun, None
            except Exception as error:
                # Clients of buckets raise errors of many kinds, and most pass; if the lease is lost by this one,
                # the next stage reports it.
                self._failure = error

    def _write(self, content: bytes) -> None:
        self._objects.filesystem.pipe_file(self._objects.path(self._number), content)

    def find_loss(self) -> str | None:
        """Return why the lease was lost; None while this process has it."""
        # A lease that was just renewed cannot be lost; only a process that slept has to check.
        if self._loss is None and _now() - self._renewed > _FRESH * RENEWAL_SECONDS:
            self._loss = self._check()
        return self._loss

    def _check(self) -> str | None:
        highest = self._objects.highest
        if highest == self._number and self._is_own():
            return None
        if highest < self._number:
            return "its lock was removed while it was being written"
        holder, cause = holder_name(self._objects.holder(highest)), self._failure
        because = f" ({type(cause).__name__}: {cause})" if cause else ""
        return f"this process did not renew its lock for {LEASE_SECONDS:.0f} s{because}, and it was taken by {holder}"

    def release(self) -> None:
        """Release the lease; afterwards the object names no holder."""
        self._ended.set()
        self._thread.join()
        # The work has ended, perhaps with an error that a failure here must not hide; the lease then becomes stale.
        with contextlib.suppress(Exception):
            if self._is_own():
                self._write(_RELEASED)

    def _is_own(self) -> bool:
        holder = self._objects.holder(self._number)
        return holder is not None and holder.token == self._holder.token


def take_lease(
    filesystem: AbstractFileSystem, folder: str, holder: Holder, on_wait: Callable[[str], None] = lambda line: None
) -> Lease | str:
    """Take a lease, or return who has it, after a wait that `on_wait` reports if nobody knows whether it lives."""
    require_exclusive_create(filesystem, folder)
    objects = _Objects(filesystem, folder)
    number = objects.highest
    content = objects.read(number) if number else _RELEASED
    if content != _RELEASED and not _is_stale(objects, number, content, on_wait):
        return holder_name(objects.holder(number))
    if not objects.create(number + 1, _held(holder, 0)):
        return holder_name(objects.holder(number + 1))
    if (highest := objects.highest) > number + 1:
        # Others took it and removed this number while this process slept between looking and taking; the next of them
        # may remove this object.
        objects.remove(number + 1)
        return holder_name(objects.holder(highest))
    for lower in objects.numbers():
        if lower <= number:
            objects.remove(lower)
    return Lease(objects, number + 1, holder, None if content == _RELEASED else read_holder(content))


def _is_stale(objects: _Objects, number: int, content: bytes, on_wait: Callable[[str], None]) -> bool:
    holder = read_holder(content)
    if holder is not None and holder.is_gone:
        return True
    on_wait(f"held by {holder_name(holder)}; waiting up to {LEASE_SECONDS:.0f} s to see whether it is alive")
    until = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < until:
        time.sleep(min(_POLL_SECONDS, RENEWAL_SECONDS))
        seen = objects.read(number)
        if seen != content:
            return seen == _RELEASED
    return True


def _now() -> float:
    """Return seconds of a clock that also runs while the machine sleeps, where the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _held(holder: Holder, count: int) -> bytes:
    return json.dumps({"holder": holder.model_dump(), "count": count}, indent=1).encode()
