"""The child that does stages: `python -m tasks.execution.child_main`, a call a line on its standard input.

It answers on its standard output, a JSON object a line: that it is ready, how far a stage is, what came of it. It ends
when its standard input does, in the middle of a stage too: whoever asked is gone.
"""

import json
import os
import queue
import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Do one stage after another."""
    # Libraries print; what is said to the parent has a stream of its own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(kind: str, value: Any) -> None:
        answers.write(json.dumps({kind: value}) + "\n")

    calls: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read, args=(calls,), daemon=True).start()
    # These take seconds to import; by now nobody is left behind if the parent goes.
    from tasks.execution.call import StageCall, carry_out
    from tasks.execution.child_process import ADVANCE, ANNOUNCE, OUTCOME, READY
    from tasks.execution.stages import STAGES, stage_named
    from tasks.progress import listen

    class Teller:
        """Tells the parent."""

        def advance(self, stage: str, done: int, total: int) -> None:
            """So many units of a stage are done."""
            say(ADVANCE, [stage, done, total])

        def log(self, line: str) -> None:
            """A line for people."""
            say(ANNOUNCE, line)

    listen(Teller())
    for name in STAGES:
        stage_named(name)
    say(READY, True)
    while True:
        call = StageCall.model_validate_json(calls.get())
        say(OUTCOME, [call.digest, carry_out(call).model_dump(mode="json")])


def _read(calls: "queue.Queue[bytes]") -> None:
    # In bytes: what the machine's locale makes of them is another thing on each.
    for line in sys.stdin.buffer:
        calls.put(line)
    # What stages have started goes as well, such as the server of a judge; nobody else would end it.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
