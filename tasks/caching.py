"""The key of a stage's result: its name, the code, and a description of its inputs by content.

Placement, progress and the name of the run are not part of it: they change no result.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext

from tasks.storage.codec import reference_serializer
from tasks.storage.reference import ArtifactRef, PolicyRef

P = ParamSpec("P")
R = TypeVar("R", ArtifactRef, PolicyRef)
Describe = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_SOURCES = ("grpo_core", "tasks")
_LIBRARIES = ("accelerate", "diffusers", "numpy", "peft", "pillow", "pyarrow", "torch", "transformers")


@lru_cache(maxsize=1)
def code_digest() -> str:
    """sha256 of the algorithm's and the tasks' sources and of the versions of the libraries that do the numbers.

    Prefect's own TASK_SOURCE sees the decorated function alone: a change in what it calls would be a stale hit.
    """
    digest = hashlib.sha256()
    top = Path(__file__).resolve().parent.parent
    for package in _SOURCES:
        for path in sorted((top / package).rglob("*.py")):
            digest.update(path.relative_to(top).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for library in _LIBRARIES:
        digest.update(f"{library} {version(library)}\n".encode())
    return digest.hexdigest()


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


def stage_task(name: str, describe: Describe) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A Prefect task whose result is a reference, kept under the stage's key and verified when it is used again.

    Args:
        name: the stage, as the UI and the command line call it.
        describe: the inputs that determine the result, as JSON values.
    """

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        keyed = task(
            name=name,
            cache_policy=StageKey(stage=name.replace(" ", "-"), describe=describe),
            persist_result=True,
            result_serializer=reference_serializer(),
        )
        return keyed(function)

    return decorate
