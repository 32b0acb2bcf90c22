"""Find what is still needed of a run: by its next start, by replays of it, and by flows that the server will run."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from configs.loader import check_config
from configs.schema import RunConfig
from flows.server.reachable import require_server, server_url
from grpo_core.errors import InputError
from tasks.checkout import CHECKOUT
from tasks.runs.layout import POLICIES, evaluation_folder
from tasks.runs.reader import RunReader
from tasks.runs.stored import find_evaluation, heldout_rewards, read_range
from tasks.storage.artifacts.reference import MANIFEST_ENDING
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.filesystem.files import is_local
from tasks.storage.filesystem.roots import open_root

TRAIN, EVALUATE, RESCORE = "grpo train", "grpo evaluate", "grpo rescore"
"""The flows that have deployments."""

BEST = "it has the best held-out reward"
_PAGE = 100


@dataclass(frozen=True)
class ScheduledFlow:
    """A flow that Prefect's server will run, or is running: its name for people, and TRAIN, EVALUATE or RESCORE."""

    name: str
    flow: str
    parameters: Mapping[str, Any]


@dataclass
class Needs:
    """Reasons to keep something.

    Attributes:
        policies: reasons by policy version.
        evaluations: reasons to keep the images of an evaluation, by policy version.
        iterations: first and last iteration (None: every later one) whose images are kept, and the reason.
        trained: the same for iterations whose states of denoising steps are kept.
    """

    policies: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    evaluations: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    iterations: list[tuple[int, int | None, str]] = field(default_factory=list)
    trained: list[tuple[int, int | None, str]] = field(default_factory=list)

    def of_iteration(self, number: int) -> list[str]:
        """Return the reasons to keep an iteration's images."""
        return _covering(self.iterations, number)

    def of_training(self, number: int) -> list[str]:
        """Return the reasons to keep the states of an iteration's denoising steps."""
        return _covering(self.trained, number)


def _covering(ranges: Sequence[tuple[int, int | None, str]], number: int) -> list[str]:
    return [why for first, last, why in ranges if first <= number and (last is None or number <= last)]


def find_needs(
    store: ArtifactStore, config: RunConfig, versions: Sequence[int], scheduled: Sequence[ScheduledFlow]
) -> Needs:
    """Find what of a run is needed, apart from its last versions; `versions` are those that have their files."""
    needs = Needs()
    rewards = heldout_rewards(store)
    if trained := [version for version in versions if version in rewards]:
        needs.policies[max(trained, key=rewards.__getitem__)].append(BEST)
    _add_training(needs, store, config, config, versions, "the next start of the run")
    add_dependents(needs, store)
    for each in scheduled:
        given, request = _mapping(each.parameters.get("config")), _mapping(each.parameters.get("request"))
        if each.flow == TRAIN and (planned := _scheduled_config(store, given)) is not None:
            _add_training(needs, store, config, planned, versions, each.name)
        elif each.flow == EVALUATE:
            version = request.get("policy")
            if isinstance(version, int) and means_run(store, str(request.get("run")), _root(request)):
                needs.policies[version].append(f"{each.name} evaluates it")
                needs.evaluations[version].append(f"{each.name} scores it")
        elif each.flow == RESCORE:
            sources = request.get("sources")
            named = [str(source) for source in sources] if isinstance(sources, list | tuple) else []
            if any(means_run(store, source, _root(request)) for source in named):
                needs.iterations.append((*_range(request.get("iterations")), f"{each.name} scores them again"))
    return needs


def add_dependents(needs: Needs, store: ArtifactStore) -> None:
    """Add the versions that unfinished replays and runs start from, and those whose adapter another run trains."""
    for name, config in _other_configs(store):
        run, _, version = str(_mapping(config.get("policy")).get("adapter")).rpartition("@")
        if run == store.run and version.isdigit():
            needs.policies[int(version)].append(f"the run {name} starts from its adapter")
        replay = _mapping(config.get("replay"))
        start = replay.get("policy") if replay.get("source") == store.run else None
        if isinstance(start, int) and _is_unfinished(store, name, config):
            if start:
                needs.policies[start].append(f"the replay {name} starts from it and is not finished")
            why = f"the replay {name} trains on it and is not finished"
            needs.trained += [(int(number), int(number), why) for number in replay.get("iterations", ())]
        run, _, version = str(_mapping(config.get("run")).get("continue_from")).rpartition("@")
        if run == store.run and version.isdigit() and _is_unfinished(store, name, config):
            needs.policies[int(version)].append(f"the run {name} continues from it and is not finished")


def _add_training(
    needs: Needs, store: ArtifactStore, config: RunConfig, planned: RunConfig, versions: Sequence[int], who: str
) -> None:
    """Add what a training by `planned` would sample or score of the versions that are there."""
    if not planned.evaluate.sets:
        return
    # Other held-out prompts, another number or seed have every version evaluated again.
    alike = planned.evaluate.model_copy(update={"every": config.evaluate.every}) == config.evaluate
    due = [version for version in versions if planned.is_evaluated(version)]
    evaluated = RunReader(store).evaluations()
    scored = {
        version
        for version in {*due, *evaluated}
        if find_evaluation(store, evaluation_folder(version), planned) is not None
    }
    for version in due:
        if not alike or version not in scored:
            needs.policies[version].append(f"{who} evaluates it: that evaluation is not complete")
    for version in evaluated:
        if version not in scored:
            needs.evaluations[version].append(f"{who} scores it: those scores are not complete")


def _scheduled_config(store: ArtifactStore, given: Mapping[str, Any]) -> RunConfig | None:
    """Return the configuration of a scheduled training of this run; None if it is another run's or cannot start."""
    name, root = _mapping(given.get("run")).get("name"), _root(_mapping(given.get("storage")))
    if name != store.run or not means_run(store, store.run, root):
        return None
    try:
        return check_config(given)
    except InputError:
        return None


def _range(chosen: object) -> tuple[int, int | None]:
    """Return first and last iteration of a rescoring; every iteration where that is unknown."""
    try:
        return (1, None) if chosen is None else read_range(str(chosen))
    except InputError:
        return 1, None


def _root(given: Mapping[str, Any]) -> str:
    return str(given.get("root", "runs"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _other_configs(store: ArtifactStore) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the configuration of each run under the same root that may start from a version of this."""
    entries = store.filesystem.ls(store.root, detail=True)
    folders = sorted(str(entry["name"]).rstrip("/") for entry in entries if entry["type"] == "directory")
    for name in (folder.rsplit("/", 1)[-1] for folder in folders):
        if name == store.run or name.startswith("."):
            continue
        content = store.read_shared(f"{name}/config.yaml") or b""
        # A training looks at all runs after each iteration, and parsing YAML is slow.
        if b"\nreplay:" in content or f"{store.run}@".encode() in content:
            with suppress(yaml.YAMLError, UnicodeDecodeError):
                yield name, _mapping(yaml.safe_load(content))


def _is_unfinished(store: ArtifactStore, name: str, config: Mapping[str, Any]) -> bool:
    end = _mapping(config.get("run")).get("iterations")
    found = store.filesystem.glob(f"{store.root}/{name}/{POLICIES}/*{MANIFEST_ENDING}")
    numbers = [str(path).rsplit("/", 1)[-1].removesuffix(MANIFEST_ENDING) for path in found]
    done = max((int(number) for number in numbers if number.isdigit()), default=0)
    # One that does not say where it ends cannot be continued.
    return isinstance(end, int) and done < end


def read_scheduled() -> tuple[ScheduledFlow, ...] | None:
    """Read what Prefect's server will run: active schedules and unfinished flow runs; None if none is configured.

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
    """Return whether a flow that names a run under a root, or the path of its folder, means this one.

    Paths are those of the machine that the flow will run on. A path that leads to no run here may lead to this one
    there, and counts as this one.
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
