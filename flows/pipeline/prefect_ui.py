"""What Prefect's UI shows: the forms of flows, and of a flow run its log, progress bars and reports.

The server checks submitted values by the form's JSON schema; the flow reads them with the project's own checks, which
report every mistake at once.
"""

import contextlib
import contextvars
import hashlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import acreate_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import get_current_settings
from prefect.utilities.callables import generate_parameter_schema
from pydantic import BaseModel, BeforeValidator

from configs.loader import check_config
from configs.schema import RunConfig
from configs.validation import validated
from flows.requests import EvaluateRequest, RepeatRequest, ReplayRequest, RescoreRequest, VerifyRequest
from flows.server.reachable import server_url, without_retries
from tasks.progress import Lines, ProgressReporter, has_listener, listen, listener
from tasks.reports.report import Report, markdown_of
from tasks.reports.text import in_cell


def _read_by(read: Callable[[Mapping[str, Any]], BaseModel]) -> BeforeValidator:
    """Read plain values with a function that raises InputError; pass the model itself on."""
    return BeforeValidator(lambda value: read(value) if isinstance(value, Mapping) else value)


TrainConfig = Annotated[RunConfig, _read_by(check_config)]
EvaluateForm = Annotated[EvaluateRequest, _read_by(partial(validated, EvaluateRequest))]
RepeatForm = Annotated[RepeatRequest, _read_by(partial(validated, RepeatRequest))]
RescoreForm = Annotated[RescoreRequest, _read_by(partial(validated, RescoreRequest))]
VerifyForm = Annotated[VerifyRequest, _read_by(partial(validated, VerifyRequest))]
ReplayForm = Annotated[ReplayRequest, _read_by(partial(validated, ReplayRequest))]


def form_schema(parameter: str, record: BaseModel) -> dict[str, Any]:
    """Return the parameter schema of a deployment whose flow takes a model, and a configuration's overrides.

    A section that may be of several kinds is one of the record's kind in the form.
    """
    model = type(record)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(parameter, kind, annotation=model)]
    if isinstance(record, RunConfig):
        # Requests have theirs.
        parameters += [inspect.Parameter("overrides", kind, default=[], annotation=list[str])]
    signature = inspect.Signature(parameters)
    schema = generate_parameter_schema(signature, {}).model_dump()
    for definition in schema["definitions"].values():
        _put_required_first(definition)
    _keep_kinds(schema["definitions"][model.__name__], record)
    _fold_optional_sections(schema["definitions"][model.__name__])
    return schema


def _keep_kinds(definition: dict[str, Any], record: BaseModel) -> None:
    """Have the form show the fields of the sections that the record has, where others would be of another kind."""
    for name, section in definition.get("properties", {}).items():
        kind = {"$ref": f"#/definitions/{type(getattr(record, name)).__name__}"}
        if kind in section.get("anyOf", ()):
            section.pop("default", None)
            section.update(kind)
            del section["anyOf"]


def _put_required_first(definition: dict[str, Any]) -> None:
    """Order the fields of a section as people fill them in; the UI shows them in this order."""
    required = definition.get("required", ())
    if properties := definition.get("properties"):
        definition["properties"] = dict(sorted(properties.items(), key=lambda each: each[0] not in required))


def _fold_optional_sections(definition: dict[str, Any]) -> None:
    """Have the UI show optional sections as lines of JSON: it takes `oneOf`, which the server checks, for any value."""
    required = definition.get("required", ())
    for name, section in definition.get("properties", {}).items():
        if name not in required and (reference := section.pop("$ref", None)) is not None:
            section.update(type="object", oneOf=[{"$ref": reference}])


SECONDS_BETWEEN_UPDATES = 5.0
"""Between two updates of a bar; a stage that ends sooner has none."""

_TIMEOUT_SECONDS = 8.0
_logger = logging.getLogger(__name__)


def artifact_key(name: str) -> str:
    """Return an artifact's key, of lower-case letters, digits and dashes; names of other characters end in a digest."""
    folded = "".join(each if each.isalnum() and each.isascii() else "-" for each in name.lower())
    return (
        f"grpo-{folded}"
        if folded == name.replace(" ", "-")
        else f"grpo-{folded}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    )


def artifact_link(artifact: UUID | str) -> str | None:
    """Return the page of an artifact's id, or the list of a key's; None without a lasting server, which has a UI."""
    ui = get_current_settings().ui_url if server_url() is not None else None
    kind = "artifact" if isinstance(artifact, UUID) else "key"
    return None if ui is None else f"{ui.rstrip('/')}/artifacts/{kind}/{artifact}"


async def publish_report(report: Report, name: str, appendix: str = "") -> UUID:
    """Show a report, with Markdown below it, on the page of the current flow run; return the id of its artifact."""
    text = f"{markdown_of(report)}\n{appendix}"
    # The UI reads the description as Markdown too.
    return await acreate_markdown_artifact(text, key=artifact_key(name), description=in_cell(report.title))


def folder_link(folder: str) -> str:
    """Return a folder's URL: file://, unless it is a URL already."""
    return folder if "://" in folder else Path(folder).absolute().as_uri()


@contextlib.contextmanager
def shown_in_ui(name: str) -> Iterator[None]:
    """Also send the progress of this context, and of stages that it calls, to the page of the current flow run."""
    # Without its own terminal, a run prints to that of the worker that started its process.
    terminal = listener() if has_listener() else Lines()
    with ThreadPoolExecutor(1, thread_name_prefix="progress artifacts") as sender:
        listen(_FlowRunPage(name, terminal, sender))
        try:
            yield
        finally:
            listen(terminal)


@dataclass
class _Bar:
    """The progress artifact of a stage; `sent` is the time of its last update, or of the stage's begin."""

    stage: str
    sent: float
    task_run: UUID | None
    artifact: UUID | None = None
    sending: "Future[None] | None" = None


class _FlowRunPage:
    """Passes everything on to a reporter, and to the server on a thread, which drops bars while it waits."""

    def __init__(self, name: str, terminal: ProgressReporter, sender: ThreadPoolExecutor) -> None:
        context = FlowRunContext.get()
        assert context is not None, "a page belongs to a flow run"
        self._name, self._terminal, self._sender = name, terminal, sender
        self._flow_run = context.flow_run.id if context.flow_run else None
        self._logger = get_run_logger()
        self._bars: dict[str, _Bar] = {}
        # Rewards that are scored concurrently report from their own threads.
        self._lock = threading.Lock()

    def log(self, line: str) -> None:
        """Write a line to the flow run's log."""
        self._terminal.log(line)
        self._logger.info(line)

    def advance(self, stage: str, done: int, total: int) -> None:
        """Update the stage's bar, if it has been running for long enough."""
        self._terminal.advance(stage, done, total)
        now, context = time.monotonic(), TaskRunContext.get()
        with self._lock:
            task_run = context.task_run.id if context else None
            bar = self._bars.setdefault(stage, _Bar(stage, now, task_run))
            ended = done == total
            if ended:
                del self._bars[stage]
            busy = bar.sending is not None and not bar.sending.done()
            due = now - bar.sent >= SECONDS_BETWEEN_UPDATES and not busy
            if due or (ended and bar.sending is not None):
                bar.sent = now
                # A stage that outlives its flow has no page any more.
                with contextlib.suppress(RuntimeError):
                    bar.sending = self._sender.submit(contextvars.copy_context().run, self._send, bar, done, total)

    def _send(self, bar: _Bar, done: int, total: int) -> None:
        percent, text = 100.0 * done / max(total, 1), f"{bar.stage}: {done:,} of {total:,}"
        try:
            with without_retries(), _client() as client:
                if bar.artifact is None:
                    kind = bar.stage.rpartition(": ")[2]
                    request = ArtifactCreate(
                        type="progress",
                        key=artifact_key(f"{self._name}-{kind}"),
                        description=text,
                        data=percent,
                        flow_run_id=self._flow_run,
                        task_run_id=bar.task_run,
                    )
                    bar.artifact = client.create_artifact(request).id
                else:
                    client.update_artifact(bar.artifact, ArtifactUpdate(data=percent, description=text))
        except (httpx.HTTPError, PrefectHTTPStatusError) as error:
            # The next update tries again; the stage itself needs no server.
            _logger.debug("%s: its progress was not sent (%s)", bar.stage, error)


def _client() -> SyncPrefectClient:
    return get_client(httpx_settings={"timeout": httpx.Timeout(_TIMEOUT_SECONDS)}, sync_client=True)
