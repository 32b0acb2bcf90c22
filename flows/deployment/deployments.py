"""The deployments of one configuration: its training, evaluations and rescorings, each with its parameters."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import Flow

from configs.loader import read_rewards_file
from configs.schema import RunConfig
from flows.evaluation.evaluate import evaluate
from flows.pipeline.forms import form_schema
from flows.pipeline.requests import EvaluateRequest, RescoreRequest
from flows.rescoring.rescore import rescore
from flows.training.train import train
from grpo_core.errors import InputError, InputErrors
from tasks.checkout import CHECKOUT

TAG = "grpo"
_CREDENTIALS = re.compile(r"://[^/@\s]+@")


@dataclass(frozen=True)
class Deployable:
    """A flow with parameters, under a name.

    Attributes:
        flow: what runs.
        entrypoint: where a worker imports it from.
        name: name of the deployment, after the flow's.
        parameters: defaults of a run.
        schema: JSON schema of the parameters.
        description: text for the UI.
        exclusive: whether only one run is allowed at a time; a second one is cancelled.
        scheduled: whether the schedule applies to it.
    """

    flow: Flow[..., Any]
    entrypoint: str
    name: str
    parameters: Mapping[str, Any]
    schema: Mapping[str, Any]
    description: str
    exclusive: bool
    scheduled: bool


def training(config: RunConfig, name: str) -> Deployable:
    """Describe the training deployment, whose form is that of its kind of policy.

    Raises:
        InputErrors: the configuration has a credential.
    """
    problems = list(credential_problems(config.model_dump(mode="json")))
    if problems:
        raise InputErrors(problems)
    return Deployable(
        flow=train,
        entrypoint="flows.training.train.train",
        name=name,
        parameters={"config": config.model_dump(mode="json")},
        schema=form_schema("config", type(config)),
        description=f"GRPO training of the run {config.run.name}; a run that was started before is resumed.",
        exclusive=True,
        scheduled=True,
    )


def evaluation(config: RunConfig, name: str) -> Deployable:
    """Describe the deployment that evaluates a policy version of the run, by default the last one."""
    request = EvaluateRequest(run=config.run.name, root=config.storage.root)
    return Deployable(
        flow=evaluate,
        entrypoint="flows.evaluation.evaluate.evaluate",
        name=name,
        parameters={"request": request.model_dump(mode="json")},
        schema=form_schema("request", EvaluateRequest),
        description=f"Held-out scores of a policy version of the run {config.run.name}.",
        exclusive=False,
        scheduled=False,
    )


def rescoring(config: RunConfig, name: str, file: Path) -> Deployable:
    """Describe the deployment that scores the run's rollouts with a rewards file, under the file's name.

    Raises:
        InputErrors: the file is missing, or is not a rewards file.
    """
    read_rewards_file(file, "--rescore")
    request = RescoreRequest(
        sources=(config.run.name,), rewards=_below_checkout(file), name=file.stem, root=config.storage.root
    )
    return Deployable(
        flow=rescore,
        entrypoint="flows.rescoring.rescore.rescore",
        name=f"{name}-{file.stem}",
        parameters={"request": request.model_dump(mode="json")},
        schema=form_schema("request", RescoreRequest),
        description=f"Stored rollouts of the run {config.run.name}, scored as {file.stem}.",
        exclusive=False,
        scheduled=False,
    )


def _below_checkout(file: Path) -> str:
    """Return the path as a worker finds it in its own checkout."""
    place = Path(os.path.abspath(file))
    return place.relative_to(CHECKOUT).as_posix() if place.is_relative_to(CHECKOUT) else str(place)


def credential_problems(values: Any, place: str = "") -> Iterator[InputError]:
    """Find every address with a user or password in it, since the UI shows parameters to everyone."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from credential_problems(value, f"{place}.{key}".lstrip("."))
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            yield from credential_problems(value, f"{place}.{index}")
    elif isinstance(values, str) and _CREDENTIALS.search(values):
        hint = "The UI shows parameters to everyone; put user and password into the worker's environment."
        yield InputError(place, _CREDENTIALS.sub("://***@", values), hint)
