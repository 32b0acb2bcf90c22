"""How often a stage is retried: each kind of retryable error is counted separately."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect import Task
from prefect.client.schemas import State, TaskRun

from configs.sections import PlacementSection, RetrySection
from tasks.execution.errors import Retryable, retryable_kind
from tasks.progress import log

# Prefect accepts at most this many delays.
_MAX_DELAYS = 50


def retry_options(placement: PlacementSection) -> dict[str, Any]:
    """Return options of a Prefect task: retries with jittered delays that double up to `retries.max_delay` seconds."""
    section = placement.retries
    limits = {kind: int(getattr(section, kind.value)) for kind in Retryable}
    # Prefect counts all kinds together; the condition counts each kind.
    total = sum(limits.values())
    if not total:
        return {"retries": 0}
    return {
        "retries": total,
        # The last delay is used for every later retry.
        "retry_delay_seconds": _delays(section, min(total, _MAX_DELAYS)),
        "retry_jitter_factor": 0.5,
        "retry_condition_fn": _condition(limits),
    }


def _delays(section: RetrySection, count: int) -> list[float]:
    return [min(section.max_delay, section.delay * 2**number) for number in range(count)]


def _condition(limits: dict[Retryable, int]) -> Callable[[Task[..., Any], TaskRun, State], bool]:
    # One task may be run several times, and concurrently.
    counts: defaultdict[UUID, Counter[Retryable]] = defaultdict(Counter)

    # A plain function: Prefect treats any other callable as one that returns False.
    def may_be_retried(task: Task[..., Any], task_run: TaskRun, state: State) -> bool:
        error = state.data
        kind = retryable_kind(error) if isinstance(error, BaseException) else None
        if kind is None:
            return False
        met = counts[task_run.id]
        left = limits[kind] - met[kind]
        if left == 0:
            return False
        met[kind] += 1
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        attempt = met.total()
        log(f"{task_run.name}: {first_line}; attempt {attempt + 1} of {attempt + left} follows")
        return True

    return may_be_retried
