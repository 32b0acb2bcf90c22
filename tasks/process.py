"""The checkout and its pages, its user's cache, pauses of collection, threads; child processes, and how they end."""

import contextlib
import gc
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
R = TypeVar("R")

CHECKOUT = Path(__file__).resolve().parent.parent
_PAGE = re.compile(r"(?<![\w/])docs/\w+\.md\b")


def openable(message: str) -> str:
    """Give the pages of docs/ in a message the path at which they can be opened from the working directory."""
    if os.path.samefile(CHECKOUT, "."):
        return message
    return _PAGE.sub(lambda page: str(CHECKOUT / page[0]), message)


def environment(**settings: str) -> dict[str, str]:
    """Return this process's environment with these settings, and with the checkout in the Python path."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", **settings}


def user_cache() -> Path | None:
    """Return the folder for what this project can make again, in the user's cache folder; None without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "grpo"
    except RuntimeError:
        return None


def code_version() -> str | None:
    """Return the checkout's commit, with `-dirty` where files were changed; None outside a git checkout."""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage in this block.

    Imports and syntax trees make hundreds of thousands of objects, almost none of them garbage. Looking through them
    again and again takes a seventh of the time of the imports, and half of that of the syntax trees.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            # To the oldest generation, as if they had survived: otherwise the next collections look through all of
            # them. What somebody else froze stays frozen.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


_THREADS = 16


def map_in_threads(function: Callable[[T], R], values: Sequence[T]) -> list[R]:
    """Call a function that waits for files with each value, several at once; results, and the first error, in order."""
    if len(values) < 2:
        return [function(each) for each in values]
    with ThreadPoolExecutor(min(len(values), _THREADS), thread_name_prefix="files") as threads:
        calls = [threads.submit(copy_context().run, function, each) for each in values]
        try:
            return [each.result() for each in calls]
        finally:
            threads.shutdown(cancel_futures=True)


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Make calls that wait for files at once, as `map_in_threads`."""
    return map_in_threads(lambda call: call(), calls)


def exit_code(child: subprocess.Popen[Any]) -> int | None:
    """Return its exit code, or None while it runs; not waited for, so that its id stays its own until `kill_family`."""
    try:
        found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # Another thread has waited for it meanwhile.
        return child.wait()
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def kill_family(child: subprocess.Popen[Any]) -> None:
    """Kill the child, its group, and processes that it started in other groups, such as those of an update."""
    if child.returncode is not None:
        # It has been waited for, and its process id may belong to another process.
        return
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(child.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
