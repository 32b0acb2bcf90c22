"""`grpo deploy`: registers a configuration with Prefect's server, or updates what is registered."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions, WorkPool
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.server.schemas.schedules import CronSchedule as Scheduled
from prefect.utilities.urls import url_for
from pydantic import BaseModel, TypeAdapter, ValidationError

from configs.loader import read_rewards_file
from configs.schema import RunConfig
from configs.validation import NAME_HINT, Name
from flows.evaluation import evaluate
from flows.pipeline.prefect_ui import form_schema
from flows.requests import DeployRequest, EvaluateRequest, RescoreRequest, VerifyRequest
from flows.rescoring.rescore import rescore
from flows.server.heartbeat_automation import ensure_automation
from flows.server.prefect_settings import CLIENT
from flows.server.reachable import KIND, require_configured
from flows.training.train import train
from flows.verification.verify import verify
from flows.worker import read_or_create_pool
from grpo_core.errors import InputError
from tasks.process import CHECKOUT
from tasks.reports.report import Report

_SETTINGS = ("PREFECT_CLIENT_MAX_RETRIES", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "PREFECT_RESULTS_DEFAULT_SERIALIZER")
ONE_AT_A_TIME = ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
_CRON_FIELDS = 5
_ZONES = "Write a name of the tz database, as UTC or Europe/Berlin."
TAG = "grpo"
IMAGE_CHECKOUT = "/grpo"
"""Where the image of Dockerfile has this checkout."""
_ENTER = "prefect.deployments.steps.set_working_directory"
_CHECKOUT_TYPES = (KIND, "process")
"""Types of pools whose workers run flows in a checkout of their own."""


@dataclass(frozen=True)
class Deployable:
    """A flow under a name, with the default of its parameter, and a text for the UI."""

    flow: Flow[..., Any]
    name: str
    record: BaseModel
    description: str

    @property
    def is_training(self) -> bool:
        """Whether the schedule applies to it, and only one run is allowed at a time; a second one is cancelled."""
        return self.flow is train

    @property
    def parameter(self) -> str:
        """Name of its parameter."""
        return "config" if self.is_training else "request"


class DeployedFlow(BaseModel):
    """A deployment as the server has it.

    Attributes:
        name: `<flow>/<deployment>`, as in Prefect's own commands.
        url: its page in the UI; None if the server has no UI.
        updated: whether it existed before.
    """

    name: str
    id: str
    url: str | None
    schedule: str | None
    updated: bool


class DeployedRun(BaseModel):
    """What was registered, training first; `watched` if the server marks runs without heartbeats as crashed."""

    run: str
    pool: str
    pool_type: str
    deployments: list[DeployedFlow]
    root: str
    watched: bool

    def report(self) -> Report:
        """Return each deployment with its page, and how to run it."""
        notes = []
        for each in self.deployments:
            notes += [f"  {each.name}, {'updated' if each.updated else 'new'}"]
            notes += [f"    schedule: {each.schedule or 'none'}"]
            notes += [f"    {each.url}"] if each.url else []
        own = self.pool_type == KIND
        notes += ["A worker, in a checkout of this project:" if self.pool_type in _CHECKOUT_TYPES else "A worker:"]
        notes += [f"  grpo worker {self.pool}" if own else f"  prefect worker start --pool {self.pool}"]
        if not self.watched:
            refused = "The server refused the automation that marks runs without heartbeats as crashed"
            notes += [f"{refused} (docs/operations.md)."]
        notes += ["A run by hand:", f"  prefect deployment run '{self.deployments[0].name}'"]
        if "://" not in self.root and not self.root.startswith(("/", "~")):
            notes += [f"Runs are kept in {self.root}/ of the worker's checkout."]
        return Report(f"{self.run}: registered for the work pool {self.pool}", notes=notes)


async def deploy_run(request: DeployRequest, config: RunConfig) -> DeployedRun:
    """Register the deployments of a configuration that the options name.

    Raises:
        InputError: an option or a key cannot be used; nothing has been registered.
    """
    name = request.name or config.run.name
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        raise InputError("--name", name, NAME_HINT) from error
    schedule = await read_schedule(request.cron, request.timezone)
    text = f"GRPO training of the run {config.run.name}; a run that was started before is resumed."
    wanted = [Deployable(train, name, config, text)]
    wanted += [evaluation(config, name)] if request.evaluate else []
    wanted += [verification(config, name)] if request.verify else []
    wanted += [rescoring(config, name, Path(file)) for file in request.rescore]
    if len({(each.flow.name, each.name) for each in wanted}) < len(wanted):
        hint = "A rescoring is named after its file, and these names are equal; rename one file."
        raise InputError("--rescore", list(request.rescore), hint)
    require_configured("--pool", request.pool)
    async with get_client() as client:
        pool = await _pool(client, request)
        refuse_image(request, pool, config)
        watched = await ensure_automation(client)
        deployed = [
            await _register(
                client, each, request, [TAG, config.run.name], pool.type, schedule if each.is_training else None
            )
            for each in wanted
        ]
    return DeployedRun(
        run=config.run.name,
        pool=request.pool,
        pool_type=pool.type,
        deployments=deployed,
        root=config.storage.root,
        watched=watched,
    )


async def _pool(client: PrefectClient, request: DeployRequest) -> WorkPool:
    if request.image is None:
        return await read_or_create_pool(client, request.pool)
    try:
        return await client.read_work_pool(request.pool)
    except ObjectNotFound as error:
        hint = f"There is none of this name: `prefect work-pool create {request.pool} --type kubernetes`, or docker."
        raise InputError("--pool", request.pool, hint) from error


def refuse_image(request: DeployRequest, pool: WorkPool, config: RunConfig) -> None:
    """Refuse an image that the pool's workers do not start, a missing one, and a container that loses its results."""
    root = config.storage.root
    if pool.type in _CHECKOUT_TYPES:
        if request.image is not None:
            hint = f"Workers of pool {pool.name} ({pool.type}) run in their own checkout; leave it out."
            raise InputError("--image", request.image, hint)
    elif request.image is None:
        hint = f"Pool {pool.name} is of type {pool.type}: name an image that has this checkout, as Dockerfile builds."
        raise InputError("--image", None, hint)
    elif "://" not in root and not root.startswith("/"):
        hint = "A container loses this folder when it ends: use a bucket, or the absolute path of a mounted volume."
        raise InputError("storage.root", root, hint)


async def read_schedule(cron: str | None, timezone: str | None) -> CronSchedule | None:
    """Parse a cron expression, whose days must exist, and a time zone; None without an expression."""
    if not cron:
        if timezone is not None:
            raise InputError("--timezone", timezone, "It is the time zone of --cron; give both.")
        return None
    zone = "UTC" if timezone is None else timezone
    fields = 'Write minute, hour, day of the month, month and day of the week: "0 2 * * *" is every night at two.'
    # Prefect accepts a sixth field, for seconds.
    if not cron.startswith("@") and len(cron.split()) != _CRON_FIELDS:
        raise InputError("--cron", cron, fields)
    try:
        schedule = CronSchedule(cron=cron, timezone=zone)
    except ValidationError as error:
        if any("timezone" in detail["loc"] for detail in error.errors()):
            raise InputError("--timezone", zone, _ZONES) from error
        raise InputError("--cron", cron, fields) from error
    if not zone:
        raise InputError("--timezone", zone, _ZONES)
    try:
        await Scheduled(cron=cron, timezone=zone).get_dates(1)
    except ValueError as error:
        raise InputError("--cron", cron, "No year has such a day.") from error
    return schedule


async def _register(
    client: PrefectClient,
    wanted: Deployable,
    request: DeployRequest,
    tags: list[str],
    pool_type: str,
    schedule: CronSchedule | None,
) -> DeployedFlow:
    try:
        known = await client.read_deployment_by_name(f"{wanted.flow.name}/{wanted.name}")
    except ObjectNotFound:
        known = None
    schedules = [DeploymentScheduleCreate(schedule=schedule, active=True)] if schedule else []
    if schedule is None and request.cron is None and known is not None:
        # With the settings made in the UI: the server replaces all schedules.
        schedules = [
            DeploymentScheduleCreate(
                schedule=kept.schedule, active=kept.active, parameters=kept.parameters, slug=kept.slug
            )
            for kept in known.schedules
        ]
    identity = await client.create_deployment(
        flow_id=await client.create_flow(wanted.flow),
        name=wanted.name,
        entrypoint=f"{wanted.flow.fn.__module__}.{wanted.flow.fn.__name__}",
        # A worker imports the flows of its own checkout.
        # In a container it enters the image's checkout first.
        pull_steps=[{_ENTER: {"directory": IMAGE_CHECKOUT}}] if request.image else [],
        job_variables=job_variables(pool_type, request.image),
        work_pool_name=request.pool,
        parameters={wanted.parameter: wanted.record.model_dump(mode="json")},
        parameter_openapi_schema=form_schema(wanted.parameter, wanted.record),
        enforce_parameter_schema=True,
        schedules=schedules,
        concurrency_limit=1 if wanted.is_training else None,
        concurrency_options=ONE_AT_A_TIME if wanted.is_training else None,
        tags=tags,
        description=wanted.description,
        paused=known.paused if known is not None else False,
    )
    return DeployedFlow(
        name=f"{wanted.flow.name}/{wanted.name}",
        id=str(identity),
        url=url_for("deployment", identity),
        schedule="; ".join(in_words(each) for each in schedules) or None,
        updated=known is not None,
    )


def job_variables(pool_type: str, image: str | None = None) -> dict[str, Any]:
    """Return the job variables of a run on a work pool of this type, in a container of an image if there is one."""
    # A process that Prefect starts reads its settings before this project is imported, and its heartbeats would be so
    # rare that flows.server.heartbeat_automation marks it as crashed.
    variables: dict[str, Any] = {"env": {name: CLIENT[name] for name in _SETTINGS}}
    # Prefect's own workers begin each run in an empty folder; a configuration's paths are relative to the checkout.
    variables |= {"working_dir": "."} if pool_type == "process" else {}
    return variables | ({"image": image} if image else {})


def in_words(schedule: DeploymentScheduleCreate) -> str:
    """Describe a schedule for people."""
    when = schedule.schedule
    if isinstance(when, CronSchedule):
        text = f"{when.cron} ({when.timezone or 'UTC'})"
    else:
        text = str(getattr(when, "rrule", None) or f"every {getattr(when, 'interval', 'now and then')}")
    return text if schedule.active else f"{text}, switched off"


def evaluation(config: RunConfig, name: str) -> Deployable:
    """Describe the deployment that evaluates a policy version of the run, by default the last one."""
    # What is deployed is the person's own configuration, and a worker may have trained nothing.
    request = EvaluateRequest(run=config.run.name, root=config.storage.root, trust_code=True)
    text = f"Held-out scores of a policy version of the run {config.run.name}."
    return Deployable(evaluate, f"{name}-evaluate", request, text)


def verification(config: RunConfig, name: str) -> Deployable:
    """Describe the deployment that computes random stages of the run again, others each time."""
    request = VerifyRequest(run=config.run.name, root=config.storage.root, trust_code=True)
    return Deployable(verify, f"{name}-verify", request, f"Stages of the run {config.run.name}, computed again.")


def rescoring(config: RunConfig, name: str, file: Path) -> Deployable:
    """Describe the deployment that scores the run's rollouts with a rewards file, under the file's name."""
    read_rewards_file(file, "--rescore")
    request = RescoreRequest(
        sources=(config.run.name,), rewards=_below_checkout(file), name=file.stem, root=config.storage.root
    )
    text = f"Stored rollouts of the run {config.run.name}, scored as {file.stem}."
    return Deployable(rescore, f"{name}-rescore-{file.stem}", request, text)


def _below_checkout(file: Path) -> str:
    """Return the path as a worker finds it in its own checkout."""
    place = Path(os.path.abspath(file))
    return place.relative_to(CHECKOUT).as_posix() if place.is_relative_to(CHECKOUT) else str(place)
