"""A command in a real pseudo-terminal of its own, where Ctrl-C is a key."""

import contextlib
import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CTRL_C = b"\x03"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SECONDS = 300.0


class Terminal:
    """A running command, and everything that its terminal has shown."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master, self._shown = process, master, b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # The terminal is gone once its last process has ended.
        with contextlib.suppress(OSError):
            while some := os.read(self._master, 1 << 16):
                self._shown += some

    @property
    def shown(self) -> str:
        """The text so far, with one space for each line break, since lines wrap at the terminal's width."""
        return " ".join(_ESCAPES.sub("", self._shown.decode(errors="replace")).split())

    def press(self, key: bytes) -> None:
        """Press a key; the terminal sends a signal for Ctrl-C."""
        os.write(self._master, key)

    def wait_for(self, text: str) -> None:
        """Wait until the terminal has shown a text."""
        until = time.monotonic() + _SECONDS
        while text not in self.shown:
            assert self.process.poll() is None, self.shown
            assert time.monotonic() < until, self.shown
            time.sleep(0.01)

    def wait(self) -> int:
        """Wait for the end of the command: its exit code."""
        code = self.process.wait(_SECONDS)
        self._reader.join(10)
        return code


@contextlib.contextmanager
def terminal(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Start `grpo COMMAND` in a terminal, and kill it at the end of the context.

    Args:
        command: arguments of the program.
        folder: of Prefect.
        environment: added to this process's variables; an empty value removes one.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x28\x00\xf0\x00\x00\x00\x00\x00")
    own = {"PREFECT_HOME": str(folder), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    variables = {name: value for name, value in {**os.environ, **own, **environment}.items() if value}
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.command_line.main", *command],
        env=variables,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
