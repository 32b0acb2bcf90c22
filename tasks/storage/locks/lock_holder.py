"""The process that has a lock, as the lock describes it, and whether it is still alive."""

import getpass
import os
import shlex
import socket
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

_MAX_COMMAND = 200
_CLOCK_SECONDS = 2.0
"""Tolerance between two readings of a process's start, since the clock may be set in between."""


class Holder(BaseModel):
    """A process that has a lock.

    Attributes:
        token: identifies this acquisition of the lock.
        user: name of the process's user.
        host: name of its machine.
        machine: boot and process namespace, within which a process id means one process; empty if unknown.
        pid: process id.
        started: start of the process, seconds since 1970.
        since: when it took the lock, UTC.
        command: command line, shortened.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str
    user: str
    host: str
    machine: str
    pid: int
    started: float
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
    """Read the holder from a lock's content; None if it is empty or damaged."""
    try:
        return Holder.model_validate_json(content)
    except ValidationError:
        return None


def holder_name(holder: Holder | None) -> str:
    """Name the holder of a lock for people."""
    return str(holder or "another process, which has not written its name")


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
