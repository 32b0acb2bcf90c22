"""The Prefect task of a stage: the key of its result, and how often it is retried.

A key is made of the stage's name, its code, and a description of its inputs by content.

Titles, the name of the run, placement and settings that change only memory are not part of it: they change no result.
Another device, thread count or batch size rounds the last bits differently; existing results stay valid.
"""

import copy
import functools
import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from prefect import Task, task
from prefect.cache_policies import CachePolicy
from prefect.client.schemas import State, TaskRun
from prefect.context import TaskRunContext
from prefect.events import Event
from prefect.utilities.annotations import quote
from pydantic import BaseModel

from configs.placement import PlacementSection
from grpo_core.errors import first_line
from tasks.execution.dispatch import dispatch
from tasks.execution.errors import retryable_kind
from tasks.execution.fingerprint import code_fingerprint
from tasks.execution.resources import resource
from tasks.execution.stage import Arguments, Kind, Part, Sharding, Stage, register
from tasks.execution.stopping import StopSignals
from tasks.progress import log
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import stage_context
from tasks.storage.prefect_results import reference_serializer

P = ParamSpec("P")
R = TypeVar("R", ArtifactRef, PolicyRef)
Describe = Callable[[Arguments], Mapping[str, Any]]
Roots = Callable[[Arguments], tuple[str, ...]]

LONGEST_DELAY = 60.0  # seconds between two tries of a stage

# Prefect accepts at most this many delays, and uses the last one for every later retry.
_MAX_DELAYS = 50
_ACCEPTED: ContextVar[Mapping[str, str]] = ContextVar("accepted_code")

# Otherwise the thread of Prefect's heartbeat builds this model while keys are computed from syntax trees, and Python
# 3.11 raises SystemError in one of two threads that build syntax trees at once.
Event.model_rebuild()


def accept_code(accepted: Mapping[str, str]) -> None:
    """Let keys of this context name changed code, the mapping's keys, by the fingerprint that the run began with."""
    _ACCEPTED.set(accepted)


def accepted_fingerprint(roots: tuple[str, ...]) -> str:
    """Return the fingerprint of the code that the roots reach, as keys contain it."""
    fingerprint = code_fingerprint(roots)
    return _ACCEPTED.get({}).get(fingerprint, fingerprint)


@dataclass
class StageKey(CachePolicy):
    """Hashes the stage's name, its code from its roots on, and what `describe` says of the inputs."""

    stage: str = ""
    roots: Roots = tuple
    describe: Describe = dict

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str:
        """Return the key: `<stage>-<sha256>`."""
        code = accepted_fingerprint(self.roots(inputs))
        text = json.dumps({"stage": self.stage, "code": code, **self.describe(inputs)}, sort_keys=True, allow_nan=False)
        return f"{self.stage}-{hashlib.sha256(text.encode()).hexdigest()}"


def retry_options(placement: PlacementSection) -> dict[str, Any]:
    """Return options of a Prefect task: retries with jittered delays that double up to `LONGEST_DELAY`."""
    tries, delay = placement.retries.tries, placement.retries.delay
    if tries == 1:
        return {"retries": 0}
    return {
        "retries": tries - 1,
        "retry_delay_seconds": [min(LONGEST_DELAY, delay * 2**number) for number in range(min(tries - 1, _MAX_DELAYS))],
        "retry_jitter_factor": 0.5,
        "retry_condition_fn": _condition(tries),
    }


def _condition(tries: int) -> Callable[[Task[..., Any], TaskRun, State], bool]:
    # One task may be run several times, and concurrently.
    failed = Counter[UUID]()

    # A plain function: Prefect treats any other callable as one that returns False.
    def may_be_retried(task: Task[..., Any], task_run: TaskRun, state: State) -> bool:
        error = state.data
        if not isinstance(error, BaseException) or retryable_kind(error) is None:
            return False
        failed[task_run.id] += 1
        # A run that was asked to stop waits for no further attempt.
        if failed[task_run.id] == tries or resource(StopSignals).requested is not None:
            return False
        log(f"{task_run.name}: {first_line(error)}; attempt {failed[task_run.id] + 1} of {tries} follows")
        return True

    return may_be_retried


def with_retries(stage: Task[P, R], title: str, placement: PlacementSection) -> Task[P, R]:
    """Return the stage's task with a title, its record in the run's folder and the placement's retries."""
    retried: Any = _retried(stage, placement)
    named: Task[P, R] = copy.copy(retried)
    named.task_run_name, named.result_storage = title, stage_context().records
    return named


@functools.lru_cache(maxsize=64)
def _retried(stage: Task[..., Any], placement: PlacementSection) -> Task[..., Any]:
    # Prefect parses the source of the stage's function each time that it makes a task.
    return stage.with_options(**retry_options(placement))


def with_quoted_arguments(arguments: Iterable[Any]) -> list[Any]:
    """Mark settings and plans: Prefect searches any other argument for results, several times a stage."""
    return [
        quote(each) if isinstance(each, BaseModel) and not isinstance(each, ArtifactRef | PolicyRef) else each
        for each in arguments
    ]


def stage_task(
    name: str,
    describe: Describe,
    *,
    kind: Kind | None = None,
    sharding: Sharding | None = None,
    modules: Roots = lambda arguments: (),
    functions: Roots = lambda arguments: (),
    uses_policy: Callable[[Arguments], bool] = lambda arguments: False,
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Make a Prefect task whose result is a reference, stored under the stage's key and verified when it is reused.

    `describe` returns the inputs that determine the result, as JSON values; the other functions are those of `Stage`.
    `kind` is the section of the placement, one of the arguments; None if the stage always runs in this process.
    """

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        stage = Stage(name, kind, function, modules, sharding, uses_policy, functions)
        signature = inspect.signature(function)
        register(stage)

        @functools.wraps(function)
        def dispatched(*args: P.args, **kwargs: P.kwargs) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return dispatch(stage, bound.arguments, submit)

        def submit(part: Part) -> Any:
            return with_retries(keyed, part.title, part.arguments["placement"]).submit(**part.arguments)

        keyed: Task[P, R] = task(
            name=name,
            cache_policy=StageKey(stage=name.replace(" ", "-"), roots=stage.roots, describe=describe),
            persist_result=True,
            # A record that is read again is verified again; and a thousand of them stay in memory otherwise.
            cache_result_in_memory=False,
            result_serializer=reference_serializer(),
        )(dispatched)
        return keyed

    return decorate
