"""A function of the user's that is called after every iteration: own logging, or an early end."""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.reports.iteration import IterationRecord

IterationHook = Callable[["IterationRecord"], object]
"""Called with the record of each iteration; returns True, or raises StopTraining, to end the run after it."""


class StopTraining(Exception):
    """Raised by an `on_iteration` hook to end the run cleanly; its text is logged as the reason."""


_HOOK: ContextVar[IterationHook | None] = ContextVar("on_iteration", default=None)


def use_hook(hook: IterationHook | None) -> None:
    """Call this hook after each iteration of this context's runs; parameters of a flow are stored in a database."""
    _HOOK.set(hook)


async def call_hook(record: "IterationRecord") -> str | None:
    """Call this context's hook, if there is one; return why the run is to end after this iteration, or None."""
    hook = _HOOK.get()
    if hook is None:
        return None
    try:
        answer = hook(record)
        if inspect.isawaitable(answer):
            answer = await answer
    except StopTraining as stop:
        return str(stop) or "on_iteration raised StopTraining"
    # Only True: a hook that returns what its logger returns should not end a run.
    return "on_iteration returned True" if answer is True else None
