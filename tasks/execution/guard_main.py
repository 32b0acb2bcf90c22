"""Run a program, and end it with everything that it started when the standard input closes, or when it ends itself.

`python -I guard_main.py PROGRAM [ARGUMENT]...`: whoever starts it keeps the other end of the pipe open, and the system
closes that even for a process that is killed. Servers that start processes of their own, as vLLM's does, leave them
behind when they are killed.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

import psutil

_SECONDS_TO_END = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Run the program and end as it does: with its exit code, or by the signal that ended it."""
    # Whatever the program started becomes a child of this process when its own parent dies.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    threading.Thread(target=_end_with_parent, args=(program,), daemon=True).start()
    code = program.wait()
    _kill_children()
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    raise SystemExit(code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent(program: "subprocess.Popen[bytes]") -> None:
    # Not by sys.stdin, whose lock this thread would hold when the interpreter ends.
    while os.read(0, 1024):
        pass
    program.terminate()
    try:
        program.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        program.kill()


def _kill_children() -> None:
    """Kill what is left, until nothing is: a process that is being killed may have started another."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1)


if __name__ == "__main__":
    main()
