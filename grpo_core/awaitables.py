"""Wait for coroutines from code that is not asynchronous, whether or not its thread runs an event loop."""

import asyncio
import atexit
import functools
import os
import threading
from collections.abc import Awaitable
from typing import TypeVar

_Result = TypeVar("_Result")


def run_awaitable(awaitable: Awaitable[_Result]) -> _Result:
    """Wait for the result; its exceptions are raised here, and an interrupt cancels it.

    One loop serves the whole process, as in TRL's trainer: a client that a user's module keeps open belongs to the
    loop that it was first used on.
    """

    async def wait() -> _Result:
        try:
            return await awaitable
        except SystemExit as error:
            # It would end the loop, and every caller would wait for ever.
            raise RuntimeError(f"it called sys.exit({error.code!r})").with_traceback(error.__traceback__) from error

    with _STARTING:
        # A forked process inherits the loop, but not the thread that runs it.
        loop = _running_loop(os.getpid())
    future = asyncio.run_coroutine_threadsafe(wait(), loop)
    try:
        return future.result()
    finally:
        future.cancel()


_STARTING = threading.Lock()


@functools.lru_cache(maxsize=1)
def _running_loop(process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=f"awaitables of process {process}", daemon=True)
    thread.start()
    atexit.register(_stop, loop, thread, process)
    return loop


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=1.0)
    if not loop.is_running():
        loop.close()
