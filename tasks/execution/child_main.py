"""The child's side of `child_process`: `python -m tasks.execution.child_main HANDLER`, one request per line.

It writes one JSON object per line to its standard output: that it is ready, progress, log lines, and the outcome or
the error of a request. It ends when its standard input closes, even during a request, since its parent is gone then.
"""

import importlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

ADVANCE, ERROR, LOG, OUTCOME, READY = "advance", "error", "log", "outcome", "ready"
HANDLERS = {
    "stage": "tasks.execution.call:stage_handler",
    "scoring": "tasks.rewards.score_rows:scoring_handler",
    "device": "tasks.update.process:device_handler",
}
"""Functions that import what the requests need, and return a function from one JSON value to another."""


def child_command(handler: str) -> tuple[str, ...]:
    """Return the arguments of the Python interpreter that start a child with a handler, one of HANDLERS or its path."""
    return ("-m", "tasks.execution.child_main", handler)


class Answers:
    """The child's messages to its parent; it is a ProgressReporter."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, kind: str, value: Any) -> None:
        """Write a message as one line."""
        remaining = (json.dumps({kind: value}) + "\n").encode()
        with self._lock:
            while remaining:
                remaining = remaining[os.write(self._stream, remaining) :]

    def advance(self, stage: str, done: int, total: int) -> None:
        """Report progress."""
        self.send(ADVANCE, [stage, done, total])

    def log(self, line: str) -> None:
        """Report a line for people."""
        self.send(LOG, line)


def main(handler: str) -> None:
    """Handle one request after another."""
    # What libraries print goes to the standard error.
    answers = Answers(os.dup(1))
    os.dup2(2, 1)
    requests: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    # These take seconds to import; from here on this process ends with its parent.
    from tasks.execution.errors import record_of
    from tasks.execution.resources import run_resources
    from tasks.progress import listen

    listen(answers)
    module, _, name = HANDLERS.get(handler, handler).partition(":")
    with run_resources():
        handle: Callable[[Any], Any] = getattr(importlib.import_module(module), name)()
        answers.send(READY, True)
        while True:
            request = json.loads(requests.get())
            try:
                answers.send(OUTCOME, handle(request))
            except Exception as error:
                answers.send(ERROR, record_of(error).model_dump(mode="json"))


def _read(requests: "queue.Queue[bytes]") -> None:
    # Bytes: text would be decoded in the machine's locale.
    for line in sys.stdin.buffer:
        requests.put(line)
    # Processes that stages have started are killed too, such as the server of a judge.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
