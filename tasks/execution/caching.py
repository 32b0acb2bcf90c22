"""The key of a stage's result: its name, the code, and a description of its inputs by content.

Progress and the name of the run are not part of it: they change no result. Nor is placement: another device or thread
count rounds the last bits otherwise, and what was made there stays what it is.
"""

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext

from configs.placement_sections import PlacementSection
from tasks.execution.code_digest import code_digest
from tasks.execution.dispatch import dispatch
from tasks.execution.retries import retry_options
from tasks.execution.stages import Kind, Part, Sharding, Stage, register
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.prefect_results.result_storage import current_records
from tasks.storage.prefect_results.serializer import reference_serializer

P = ParamSpec("P")
R = TypeVar("R", ArtifactRef, PolicyRef)
Describe = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass
class StageKey(CachePolicy):
    """Hashes what `describe` says of the inputs, with the stage's name and the code.

    Attributes:
        stage: name of the stage, the readable part of the key.
        describe: the inputs that determine the result, as JSON values.
    """

    stage: str = ""
    describe: Describe = dict

    def compute_key(
        self,
        task_ctx: TaskRunContext,
        inputs: dict[str, Any],
        flow_parameters: dict[str, Any],
        **kwargs: Any,
    ) -> str:
        """The key: `<stage>-<sha256>`."""
        described = {"stage": self.stage, "code": code_digest(), **self.describe(inputs)}
        text = json.dumps(described, sort_keys=True, allow_nan=False)
        return f"{self.stage}-{hashlib.sha256(text.encode()).hexdigest()}"


def configured(stage: Task[P, R], title: str, placement: PlacementSection) -> Task[P, R]:
    """The stage's task under a title, with its record in the run's folder, tried again as the placement says."""
    return stage.with_options(task_run_name=title, result_storage=current_records(), **retry_options(placement))


def stage_task(
    name: str, describe: Describe, *, kind: Kind | None = None, sharding: Sharding | None = None
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A Prefect task whose result is a reference, kept under the stage's key and verified when it is used again.

    Args:
        name: the stage, as the UI and the command line call it.
        describe: the inputs that determine the result, as JSON values.
        kind: its section of the placement, which is one of its arguments; None: it is always done in this process.
        sharding: how it is cut and joined, where it can be.
    """

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        stage, signature = Stage(name, kind, function, sharding), inspect.signature(function)
        register(stage)

        @functools.wraps(function)
        def placed(*args: P.args, **kwargs: P.kwargs) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return dispatch(stage, bound.arguments, submit)

        def submit(part: Part) -> Any:
            return configured(keyed, part.title, part.arguments["placement"]).submit(**part.arguments)

        keyed: Task[P, R] = task(
            name=name,
            cache_policy=StageKey(stage=name.replace(" ", "-"), describe=describe),
            persist_result=True,
            result_serializer=reference_serializer(),
        )(placed)
        return keyed

    return decorate
