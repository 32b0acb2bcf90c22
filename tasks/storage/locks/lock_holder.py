"""Who holds a run: what a lock says of its process, and whether that process is still there."""

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

_LONGEST_COMMAND = 200
_CLOCK_SECONDS = 2.0
"""How far two readings of a process's start may be apart; the clock that it is told by can be set in between."""


class Holder(BaseModel):
    """A process that holds a run.

    Attributes:
        token: of this one hold.
        user: whose process it is.
        host: name of its machine.
        machine: boot and process namespace, within which a process id means one process; empty where unknown.
        pid: process id.
        started: of the process, seconds since 1970.
        since: when it took hold, UTC.
        command: its command line, shortened.
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
        """Whether its process ended for sure; that of another machine, or another container, is never known to have."""
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
    """A holder that is this process and takes hold at this moment."""
    return Holder(
        token=uuid.uuid4().hex,
        user=_user(),
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        command=_command(),
    )


def described_holder(content: bytes) -> Holder | None:
    """The holder that a lock's file describes; None for an empty file or one that is not whole."""
    try:
        return Holder.model_validate_json(content)
    except ValidationError:
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container's user need not have a name.
        return f"user {os.getuid()}"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _command() -> str:
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    command = shlex.join(words)
    return command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]} ..."
