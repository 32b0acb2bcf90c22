"""Run a flow to its end, also where an event loop runs already (a notebook), with its messages as lines on stderr."""

import contextvars
import os
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import wait
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.process import collection_paused
from tasks.progress import Lines, Silence, listen, log

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from flows.training.hooks import IterationHook

R = TypeVar("R")


def run_flow(body: Callable[[], Coroutine[Any, Any, R]], hook: "IterationHook | None" = None, *, progress: bool) -> R:
    """Run a flow in a separate context, so that listeners and hooks end with it.

    `body` checks the input and returns the flow. It may ask a person, so bars begin with the flow.
    """

    def run() -> R:
        from flows.training.hooks import use_hook

        use_hook(hook)
        with collection_paused():
            work = body()
        from flows.terminal.progress import training_progress

        with closing(work), training_progress() if progress else nullcontext():
            return _run_to_the_end(work)

    return reporting(run, progress=progress)


def reporting(call: Callable[[], R], *, progress: bool) -> R:
    """Call a function in a separate context, whose messages are lines on stderr."""

    def run() -> R:
        listen(Lines() if progress else Silence())
        return call()

    return contextvars.copy_context().run(run)


def start_server() -> None:
    """Start a temporary server if none is configured, or refuse one that does not listen; imports go on meanwhile."""
    from flows.server.reachable import refuse_closed_address
    from flows.server.temporary import start_temporary_server

    refuse_closed_address()
    if start_temporary_server():
        log("starting Prefect's server, and loading libraries meanwhile ...")


@contextmanager
def all_machines(given: "RunConfig", *, progress: bool) -> Iterator[None]:
    """Run a training's updates on every machine that it was started on; only the first returns, the others exit."""
    if "MASTER_ADDR" not in os.environ:
        yield
        return
    # torch, which takes seconds to import, is not needed to learn that a run has finished.
    from tasks.update.machines import Machines, claim_rendezvous, first_machine
    from tasks.update.process import take_part_in_updates

    rendezvous = claim_rendezvous(os.environ)
    # Each machine has devices of its own.
    shared = given.model_dump(mode="json", exclude={"placement": {"devices", "torch_threads"}})
    if rendezvous is None or rendezvous.rank == 0:
        with first_machine(rendezvous, shared):
            yield
        return

    def take_part() -> None:
        take_part_in_updates(Machines(rendezvous, shared), given.placement)

    reporting(take_part, progress=progress)
    raise SystemExit(0)


def _run_to_the_end(work: Coroutine[Any, Any, R]) -> R:
    from flows.server.reachable import watching_server
    from flows.server.temporary import require_not_lost, wait_for_temporary_server

    wait_for_temporary_server()
    try:
        with watching_server():
            return _run_in_loop(work)
    except Exception:
        # Whatever request was the first to fail; the server is why.
        require_not_lost()
        raise


def _run_in_loop(work: Coroutine[Any, Any, R]) -> R:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        from tasks.execution.stopping import signals_raise

        with signals_raise():
            return asyncio.run(work)
    # A running loop cannot be entered again, so the flow has its own in a thread; an interrupt here cancels it.
    from anyio.from_thread import start_blocking_portal

    async def awaited() -> R:
        return await work

    with start_blocking_portal() as portal:
        future = portal.start_task_soon(awaited)
        # Not in one wait: after polars is imported, its own handler of SIGINT lets a wait for a lock go on.
        while not wait([future], timeout=0.25).done:
            pass
        return future.result()
