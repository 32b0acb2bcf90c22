"""`grpo deploy`: registers a configuration with Prefect's server, or updates what is registered."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions, DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.server.schemas.schedules import CronSchedule as Scheduled
from prefect.settings import get_current_settings
from pydantic import BaseModel, TypeAdapter, ValidationError

from configs.schema import RunConfig
from configs.sections import NAME_HINT, Name
from flows.deployment.deployments import TAG, Deployable, evaluation, rescoring, training
from flows.prefect_settings import CLIENT
from flows.server.heartbeat_automation import ensure_automations
from flows.server.reachable import require_pools
from grpo_core.errors import InputError, InputErrors

_SETTINGS = ("PREFECT_CLIENT_MAX_RETRIES", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "PREFECT_RESULTS_DEFAULT_SERIALIZER")
_CRON_FIELDS = 5
_ZONES = "Write a name of the tz database, as UTC or Europe/Berlin."


@dataclass(frozen=True)
class DeployRequest:
    """The options of `grpo deploy`.

    Attributes:
        config: the resolved configuration.
        name: name of the deployments; None for the run's.
        pool: work pool whose workers run them.
        cron: when training starts; None to keep a schedule, empty to remove it.
        timezone: time zone of `cron`, such as `Europe/Berlin`; None for UTC.
        evaluation: whether to register evaluations of the run too.
        rescorings: rewards files to register rescorings with.
    """

    config: RunConfig
    name: str | None = None
    pool: str = "training"
    cron: str | None = None
    timezone: str | None = None
    evaluation: bool = False
    rescorings: tuple[Path, ...] = ()


class DeployedFlow(BaseModel):
    """A deployment as the server has it.

    Attributes:
        name: `<flow>/<deployment>`, as in Prefect's own commands.
        id: its id on the server.
        url: its page in the UI; None if the server has no UI.
        schedule: description of the schedule; None without one.
        updated: whether it existed before.
    """

    name: str
    id: str
    url: str | None
    schedule: str | None
    updated: bool


class DeployedRun(BaseModel):
    """What was registered.

    Attributes:
        run: name of the run.
        pool: work pool.
        pool_type: `grpo`, `process` or another.
        deployments: training first.
        root: where runs are stored; a relative folder is in the worker's checkout.
    """

    run: str
    pool: str
    pool_type: str
    deployments: list[DeployedFlow]
    root: str


async def deploy_run(request: DeployRequest) -> DeployedRun:
    """Register the deployments that the options name.

    Raises:
        InputError, InputErrors: an option or a key cannot be used; nothing has been registered.
    """
    name = request.name or request.config.run.name
    _require_name(name)
    schedule = await read_schedule(request.cron, request.timezone)
    wanted = [training(request.config, name)]
    wanted += [evaluation(request.config, name)] if request.evaluation else []
    wanted += [rescoring(request.config, name, file) for file in request.rescorings]
    _require_distinct(wanted, request.rescorings)
    require_pools([("--pool", request.pool)], kind=None)
    async with get_client() as client:
        pool = await client.read_work_pool(request.pool)
        await ensure_automations(client)
        deployed = [
            await _register(client, each, request, pool.type, schedule if each.scheduled else None) for each in wanted
        ]
    return DeployedRun(
        run=request.config.run.name,
        pool=request.pool,
        pool_type=pool.type,
        deployments=deployed,
        root=request.config.storage.root,
    )


async def read_schedule(cron: str | None, timezone: str | None) -> CronSchedule | None:
    """Parse a cron expression and a time zone; None without an expression.

    Raises:
        InputError: one of them is invalid, or the expression names a day that does not exist.
    """
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


def _require_name(name: str) -> None:
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError as error:
        raise InputError("--name", name, NAME_HINT) from error


def _require_distinct(wanted: Sequence[Deployable], files: Sequence[Path]) -> None:
    names = [(each.flow.name, each.name) for each in wanted]
    if len(set(names)) < len(names):
        hint = "A rescoring is named after its file, and these names are equal; rename one file."
        raise InputErrors([InputError("--rescore", [str(file) for file in files], hint)])


async def _register(
    client: PrefectClient, wanted: Deployable, request: DeployRequest, pool_type: str, schedule: CronSchedule | None
) -> DeployedFlow:
    known = await _find(client, f"{wanted.flow.name}/{wanted.name}")
    schedules = [DeploymentScheduleCreate(schedule=schedule, active=True)] if schedule else []
    if schedule is None and request.cron is None and known is not None:
        schedules = [_again(kept) for kept in known.schedules]
    identity = await client.create_deployment(
        flow_id=await client.create_flow(wanted.flow),
        name=wanted.name,
        entrypoint=wanted.entrypoint,
        # A worker imports the flows of its own checkout.
        pull_steps=[],
        job_variables=job_variables(pool_type),
        work_pool_name=request.pool,
        parameters=dict(wanted.parameters),
        parameter_openapi_schema=dict(wanted.schema),
        enforce_parameter_schema=True,
        schedules=schedules,
        concurrency_limit=1 if wanted.exclusive else None,
        concurrency_options=ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
        if wanted.exclusive
        else None,
        tags=[TAG, request.config.run.name],
        description=wanted.description,
        paused=known.paused if known is not None else False,
    )
    ui = get_current_settings().ui_url
    return DeployedFlow(
        name=f"{wanted.flow.name}/{wanted.name}",
        id=str(identity),
        url=f"{ui}/deployments/deployment/{identity}" if ui else None,
        schedule="; ".join(in_words(each) for each in schedules) or None,
        updated=known is not None,
    )


def _again(kept: DeploymentSchedule) -> DeploymentScheduleCreate:
    """Copy a schedule with the settings made in the UI; the server replaces all schedules."""
    return DeploymentScheduleCreate(
        schedule=kept.schedule,
        active=kept.active,
        parameters=kept.parameters,
        slug=kept.slug,
    )


def job_variables(pool_type: str) -> dict[str, Any]:
    """Return the job variables of a run.

    Args:
        pool_type: type of the work pool.
    """
    # A process that Prefect starts reads its settings before this project is imported, and its heartbeats would be so
    # rare that flows.server.heartbeat_automation marks it as crashed.
    variables: dict[str, Any] = {"env": {name: CLIENT[name] for name in _SETTINGS}}
    # Prefect's own workers begin each run in an empty folder; a configuration's paths are relative to the checkout.
    return variables | ({"working_dir": "."} if pool_type == "process" else {})


async def _find(client: PrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return await client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def in_words(schedule: DeploymentScheduleCreate) -> str:
    """Describe a schedule for people."""
    when = schedule.schedule
    if isinstance(when, CronSchedule):
        text = f"{when.cron} ({when.timezone or 'UTC'})"
    else:
        text = str(getattr(when, "rrule", None) or f"every {getattr(when, 'interval', 'now and then')}")
    return text if schedule.active else f"{text}, switched off"
