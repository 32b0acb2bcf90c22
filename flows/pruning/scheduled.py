"""What Prefect's server will run: deployments with an active schedule, and flow runs that wait or are at work."""

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
"""The flows that deployments are made of."""

_PAGE = 100


@dataclass(frozen=True)
class ScheduledFlow:
    """A flow that will run, or is running.

    Attributes:
        name: for people.
        flow: one of the three.
        parameters: that it runs with, as far as the server knows them.
    """

    name: str
    flow: str
    parameters: Mapping[str, Any]


def read_scheduled() -> tuple[ScheduledFlow, ...] | None:
    """All that the configured server knows; None where none is configured.

    Raises:
        InputError: a server is configured and cannot be used.
    """
    if server_url() is None:
        return None
    require_server()
    return tuple(_read())


def _read() -> Iterator[ScheduledFlow]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    wanted = FlowFilter(name=FlowFilterName(any_=[TRAIN, EVALUATE, RESCORE]))
    with get_client(sync_client=True) as client:
        flows: dict[Any, str] = {}
        while page := client.read_flows(flow_filter=wanted, limit=_PAGE, offset=len(flows)):
            flows |= {flow.id: flow.name for flow in page}
        yield from _deployments(client, wanted, flows)
        yield from _flow_runs(client, wanted, flows)


def _deployments(client: Any, wanted: Any, flows: Mapping[Any, str]) -> Iterator[ScheduledFlow]:
    seen = 0
    while page := client.read_deployments(flow_filter=wanted, limit=_PAGE, offset=seen):
        seen += len(page)
        for deployment in page:
            flow = flows[deployment.flow_id]
            # One that is paused may be resumed by a click.
            for schedule in (each for each in deployment.schedules if each.active):
                parameters = {**deployment.parameters, **schedule.parameters}
                yield ScheduledFlow(f"the schedule of {flow}/{deployment.name}", flow, parameters)


def _flow_runs(client: Any, wanted: Any, flows: Mapping[Any, str]) -> Iterator[ScheduledFlow]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType

    kinds = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
    waiting = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=kinds)))
    seen = 0
    while page := client.read_flow_runs(flow_filter=wanted, flow_run_filter=waiting, limit=_PAGE, offset=seen):
        seen += len(page)
        for run in page:
            # Schedules make theirs days ahead, all alike.
            if run.auto_scheduled and run.state_type == StateType.SCHEDULED:
                continue
            yield ScheduledFlow(f"the flow run {run.name}", flows[run.flow_id], run.parameters)


def means_run(store: ArtifactStore, source: str, root: str) -> bool:
    """Whether a flow that is asked for a run under a root is asked for this one.

    Paths are those of the machine that the flow will run on. One that leads to no run here may lead to this one there,
    and counts as if it did.

    Args:
        store: of the run.
        source: a run under the root, or the path of its folder.
        root: a folder or any fsspec URL.
    """
    parent, _, name = source.rstrip("/").rpartition("/")
    if name != store.run:
        return False
    try:
        filesystem, place = open_root(_of_checkout(parent or root))
    except InputError:
        # Such a flow cannot begin.
        return False
    if is_local(filesystem) != is_local(store.filesystem):
        return False
    if not is_local(filesystem):
        return str(filesystem.unstrip_protocol(place)) == str(store.filesystem.unstrip_protocol(store.root))
    theirs, ours = Path(place) / name, Path(store.path())
    return not theirs.is_dir() or os.path.samefile(theirs, ours)


def _of_checkout(root: str) -> str:
    return root if "://" in root or root.startswith(("/", "~")) else str(Path(CHECKOUT) / root)
