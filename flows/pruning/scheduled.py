"""What Prefect's server will run: deployments with an active schedule, and flow runs that wait or are running."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.server.reachable import require_server, server_url
from grpo_core.errors import InputError
from tasks.checkout import CHECKOUT
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.filesystem.files import is_local
from tasks.storage.filesystem.roots import open_root

TRAIN, EVALUATE, RESCORE = "grpo train", "grpo evaluate", "grpo rescore"
"""The flows that have deployments."""

_PAGE = 100


@dataclass(frozen=True)
class ScheduledFlow:
    """A flow that will run, or is running.

    Attributes:
        name: name for people.
        flow: TRAIN, EVALUATE or RESCORE.
        parameters: the parameters that the server knows.
    """

    name: str
    flow: str
    parameters: Mapping[str, Any]


def read_scheduled() -> tuple[ScheduledFlow, ...] | None:
    """Read all that the configured server will run; None if no server is configured.

    Raises:
        InputError: a server is configured and cannot be used.
    """
    if server_url() is None:
        return None
    require_server()
    return tuple(_read())


def _read() -> Iterator[ScheduledFlow]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowFilter,
        FlowFilterName,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType

    wanted = {"flow_filter": FlowFilter(name=FlowFilterName(any_=[TRAIN, EVALUATE, RESCORE]))}
    kinds = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
    waiting = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=kinds)))
    with get_client(sync_client=True) as client:
        flows = {flow.id: flow.name for flow in _pages(client.read_flows, **wanted)}
        for deployment in _pages(client.read_deployments, **wanted):
            flow = flows[deployment.flow_id]
            # A paused deployment may be resumed by a click.
            for schedule in (each for each in deployment.schedules if each.active):
                parameters = {**deployment.parameters, **schedule.parameters}
                yield ScheduledFlow(f"the schedule of {flow}/{deployment.name}", flow, parameters)
        for run in _pages(client.read_flow_runs, flow_run_filter=waiting, **wanted):
            # Schedules create theirs days ahead, all alike.
            if not (run.auto_scheduled and run.state_type == StateType.SCHEDULED):
                yield ScheduledFlow(f"the flow run {run.name}", flows[run.flow_id], run.parameters)


def _pages(read: Any, **filters: Any) -> Iterator[Any]:
    seen = 0
    while page := read(limit=_PAGE, offset=seen, **filters):
        seen += len(page)
        yield from page


def means_run(store: ArtifactStore, source: str, root: str) -> bool:
    """Whether a flow that names a run under a root means this one.

    Paths are those of the machine that the flow will run on. A path that leads to no run here may lead to this one
    there, and counts as this one.

    Args:
        store: the run.
        source: a run under the root, or the path of its folder.
        root: a folder or any fsspec URL.
    """
    parent, _, name = source.rstrip("/").rpartition("/")
    if name != store.run:
        return False
    named = parent or root
    absolute = "://" in named or named.startswith(("/", "~"))
    try:
        filesystem, place = open_root(named if absolute else str(Path(CHECKOUT) / named))
    except InputError:
        # Such a flow cannot start.
        return False
    if is_local(filesystem) != is_local(store.filesystem):
        return False
    if not is_local(filesystem):
        return str(filesystem.unstrip_protocol(place)) == str(store.filesystem.unstrip_protocol(store.root))
    theirs, ours = Path(place) / name, Path(store.path())
    return not theirs.is_dir() or os.path.samefile(theirs, ours)
