"""The key of a stage's result: its name, the code, and a description of its inputs by content.

Progress and the name of the run are not part of it: they change no result. Nor is placement: another device or thread
count rounds the last bits otherwise, and what was made there stays what it is.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
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

_SOURCES = ("grpo_core", "tasks", "configs")
# They say what was done and do nothing of it; a run is not to begin anew for another colour of its page.
_WITHOUT_EFFECT = (
    "tasks/reports/",
    "configs/checks.py",
    "configs/dataset_checks.py",
    "configs/reward_checks.py",
    "configs/rewards_file.py",
    "configs/loader.py",
)
_LIBRARIES = (
    "accelerate",
    "bitsandbytes",
    "diffusers",
    "lpips",
    "numpy",
    "onnxruntime",
    "open-clip-torch",
    "opencv-python-headless",
    "peft",
    "pillow",
    "pyarrow",
    "pytorch-msssim",
    "rapidfuzz",
    "rapidocr",
    "regex",
    "safetensors",
    "scipy",
    "tokenizers",
    "torch",
    "torchvision",
    "transformers",
)


@lru_cache(maxsize=1)
def code_digest() -> str:
    """sha256 of the algorithm's and the tasks' sources and of the versions of the libraries that do the numbers.

    Prefect's own TASK_SOURCE sees the decorated function alone: a change in what it calls would be a stale hit.
    """
    digest = hashlib.sha256()
    top = Path(__file__).resolve().parent.parent
    for name in determining_sources():
        digest.update(name.encode() + b"\0" + (top / name).read_bytes() + b"\0")
    for library, number in library_versions().items():
        digest.update(f"{library} {number}\n".encode())
    return digest.hexdigest()


def determining_sources() -> list[str]:
    """The files that a result depends on, relative to the checkout."""
    top = Path(__file__).resolve().parent.parent
    names = (path.relative_to(top).as_posix() for package in _SOURCES for path in (top / package).rglob("*.py"))
    return sorted(name for name in names if not name.startswith(_WITHOUT_EFFECT))


def library_versions() -> dict[str, str]:
    """The libraries that do the numbers, with the versions installed here."""
    return {library: _version(library) for library in _LIBRARIES}


def _version(library: str) -> str:
    """Of an optional library that is not installed, `none`."""
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"


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
