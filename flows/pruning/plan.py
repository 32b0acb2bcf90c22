"""What pruning deletes from one run, and what it keeps although the rules would delete it, with the reasons."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from configs.rollouts import TextRolloutSection
from configs.schema import RunConfig
from configs.yaml_files import parse_yaml
from flows.pruning.request import Age, Retention
from grpo_core.errors import InputError
from tasks.process import map_in_threads
from tasks.pruning import (
    FILES_REMOVED,
    Prunable,
    abandoned_writes,
    bytes_below,
    delete_part,
    find_prunable,
    old_calls,
    part_bytes,
)
from tasks.runs.layout import (
    ADVANTAGES,
    POLICIES,
    PREVIEWS,
    REWARDS,
    ROLLOUTS,
    evaluation_folder,
    is_previews,
    iteration_folder,
    policy_folder,
    previews_folder,
)
from tasks.runs.reader import RunReader
from tasks.runs.stored import find_evaluation
from tasks.runs.stored_policies import heldout_rewards
from tasks.storage.artifacts.commit import IMAGES_REMOVED, STATES_REMOVED
from tasks.storage.artifacts.reference import MANIFEST_ENDING, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import matching
from tasks.storage.links import LinkError

VERSIONS, IMAGES, STEPS = "policy versions", "images of iterations", "denoising steps of iterations"
CALLS, WRITES = "calls of work pools", "unfinished writes"
KINDS = (VERSIONS, IMAGES, STEPS, CALLS, WRITES)
"""What pruning deletes, in the order of its report."""

BEST = "it has the best held-out reward"
UNSCORED = "its scores or advantages are not complete"
UNTRAINED = "no policy has been trained on it"


@dataclass(frozen=True)
class Deletion:
    """Something to delete: its kind and name, the bytes that this frees, and what deletes it, which may be repeated."""

    kind: str
    name: str
    size: int
    delete: Callable[[], object]


@dataclass
class RunPlan:
    """What pruning does to one run.

    Attributes:
        trusted: versions that this process has written, whose files are not verified again.
        kept: names of what the rules would delete, by kind and reason.
        notes: what else people should know.
    """

    store: ArtifactStore
    retention: Retention
    now: datetime
    trusted: frozenset[int] = frozenset()
    deleted: list[Deletion] = field(default_factory=list)
    kept: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def decide(self, kind: str, name: str, prunable: Prunable, part: str, reasons: Sequence[str]) -> None:
        """Delete a part of an artifact unless there are reasons to keep it; an interrupted deletion is finished."""
        if reasons and part not in prunable.removed:
            self.kept.setdefault((kind, "; ".join(dict.fromkeys(reasons))), []).append(name)
            return

        def delete() -> None:
            # Found again: images and states of the same rollouts may both be due.
            found = find_prunable(self.store, prunable.folder)
            if found is None:
                raise StaleReferenceError(f"{self.store.run}/{prunable.folder}: it has no manifest")
            delete_part(self.store, found, part, self.retention.by, self.now)

        self.deleted.append(Deletion(kind, name, part_bytes(self.store, prunable, part), delete))


@dataclass
class Needs:
    """Reasons to keep policy versions, by version, and to keep the denoising steps of iterations, by number."""

    policies: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    trained: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))


def plan_run(store: ArtifactStore, config: RunConfig, retention: Retention, now: datetime) -> RunPlan:
    """Decide what to delete and what to keep; nothing is changed."""
    plan, needs = RunPlan(store, retention, now), Needs()
    found = {version: find_prunable(store, policy_folder(version)) for version in RunReader(store).policies()}
    versions = {version: prunable for version, prunable in found.items() if prunable is not None}
    if retention.last is not None:
        complete = [version for version, prunable in versions.items() if prunable.is_complete]
        add_best(needs, heldout_rewards(store), complete)
        _add_next_start(needs, store, config, complete)
    add_dependents(needs, store)
    plan_versions(plan, config, versions, needs)
    _plan_iterations(plan, config, needs)
    for path in old_calls(store, now):
        size = bytes_below(store, path)
        plan.deleted.append(Deletion(CALLS, path, size, partial(store.filesystem.rm_file, path)))
    for folder in abandoned_writes(store):
        # clear_abandoned checks once more whether their processes are gone.
        plan.deleted.append(Deletion(WRITES, folder, bytes_below(store, folder), store.clear_abandoned))
    return plan


def plan_versions(plan: RunPlan, config: RunConfig, versions: Mapping[int, Prunable], needs: Needs) -> None:
    """Decide which of these policy versions are deleted."""
    store, retention, sampling = plan.store, plan.retention, config.run.staleness + 1
    # The last versions whose files are all valid, latest first, and the damaged ones among them.
    last: list[int] = []
    damaged: list[int] = []
    for version in reversed([version for version, prunable in versions.items() if prunable.is_complete]):
        if retention.last is None or len(last) == max(retention.last, sampling):
            break
        valid = version in plan.trusted or store.find(policy_folder(version)) is not None
        (last if valid else damaged).append(version)
    for version, prunable in versions.items():
        on_the_way = retention.every is not None and version % retention.every == 0
        if prunable.is_complete and (retention.last is None or version in last[: retention.last] or on_the_way):
            continue
        if not prunable.has_files:
            continue
        reasons = ["the next iterations are sampled with it"] if version in last[:sampling] else []
        reasons += ["it is damaged, and the next start makes it again"] if version in damaged else []
        reasons += needs.policies.get(version, [])
        plan.decide(VERSIONS, str(version), prunable, FILES_REMOVED, reasons)


def _plan_iterations(plan: RunPlan, config: RunConfig, needs: Needs) -> None:
    store, reader, retention = plan.store, RunReader(plan.store), plan.retention
    if retention.images is not None and isinstance(config.rollout, TextRolloutSection):
        plan.notes.append("its rollouts are texts, which have no images")
    rounds = {number: list(_sampled(reader, iteration_folder(number))) for number in reader.iterations()}
    found = {
        number: {each: prunable for each in folders if (prunable := find_prunable(store, f"{each}/{ROLLOUTS}"))}
        for number, folders in rounds.items()
    }
    last = max((number for number, rollouts in found.items() if rollouts), default=0)

    def due(part: str, age: Age | None, number: int) -> dict[str, Prunable]:
        """Return the rollouts of an iteration that have such files and are old enough, by their sampling round."""
        return {
            folder: each
            for folder, each in found[number].items()
            if each.names(part)
            and (
                part_bytes(store, each, part) > 0
                if part in each.removed
                else age is not None and age.reached(each.made, plan.now, number, last)
            )
        }

    for number, folders in rounds.items():
        images = due(IMAGES_REMOVED, retention.images, number)
        scored = {each: config.counted_rewards if is_previews(each) else config.rewards for each in folders}
        scores = [f"{each}/{REWARDS}/{section.label}" for each, mix in scored.items() for section in mix]
        # An incomplete stage of the iteration still needs its images.
        complete = not images or all(store.find(each) for each in [f"{folders[-1]}/{ADVANTAGES}", *scores])
        for folder, rollouts in images.items():
            plan.decide(IMAGES, folder, rollouts, IMAGES_REMOVED, [] if complete else [UNSCORED])
        untrained = [] if find_prunable(store, policy_folder(number)) else [UNTRAINED]
        for folder, rollouts in due(STATES_REMOVED, retention.states, number).items():
            plan.decide(STEPS, folder, rollouts, STATES_REMOVED, [*needs.trained.get(number, []), *untrained])


def _sampled(reader: RunReader, folder: str) -> Iterator[str]:
    """Yield the folders of an iteration's rollouts: of each sampling round, after those of its previews."""
    for each in reader.rounds(folder):
        if PREVIEWS in reader.names(each):
            yield previews_folder(each)
        yield each


def add_best(needs: Needs, rewards: Mapping[int, float], versions: Sequence[int]) -> None:
    """Add the one of these versions with the highest held-out reward; `rewards` are by version."""
    if known := [version for version in versions if version in rewards]:
        needs.policies[max(known, key=rewards.__getitem__)].append(BEST)


def _add_next_start(needs: Needs, store: ArtifactStore, config: RunConfig, versions: Sequence[int]) -> None:
    """Add the versions that the next start of the run has still to evaluate."""
    for version in versions if config.evaluate.sets else ():
        if config.is_evaluated(version) and find_evaluation(store, evaluation_folder(version), config) is None:
            needs.policies[version].append("the next start of the run evaluates it: that evaluation is not complete")


def add_dependents(needs: Needs, store: ArtifactStore, configs: "OtherConfigs | None" = None) -> None:
    """Add the versions that unfinished replays and runs start from, and those whose adapter another run trains."""
    # Another run may have started from it before this one became an earlier run.
    own = {store.run, store.run.partition("~")[0]}
    for name, config in (configs or OtherConfigs()).of(store, own):
        run, _, version = str(_mapping(config.get("policy")).get("adapter")).rpartition("@")
        if run in own and version.isdigit():
            needs.policies[int(version)].append(f"the run {name} starts from its adapter")
        replay = _mapping(config.get("replay"))
        start = replay.get("policy") if replay.get("source") in own else None
        if isinstance(start, int) and _is_unfinished(store, name, config):
            if start:
                needs.policies[start].append(f"the replay {name} starts from it and is not finished")
            numbers = replay.get("iterations")
            for number in numbers if isinstance(numbers, list) else ():
                if isinstance(number, int):
                    needs.trained[number].append(f"the replay {name} trains on it and is not finished")
        run, _, version = str(_mapping(config.get("run")).get("continue_from")).rpartition("@")
        if run in own and version.isdigit() and _is_unfinished(store, name, config):
            needs.policies[int(version)].append(f"the run {name} continues from it and is not finished")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


class OtherConfigs:
    """The configurations of the other runs under a root; a file is read again once its time or size has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Mapping[str, Any]]] = {}

    def of(self, store: ArtifactStore, own: set[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield name and configuration of each run that may start from a version of this, which has the `own` names."""
        entries = store.filesystem.ls(store.root, detail=True)
        folders = sorted(str(entry["name"]).rstrip("/") for entry in entries if entry["type"] == "directory")
        names = [folder.rsplit("/", 1)[-1] for folder in folders]
        others = [name for name in names if name != store.run and not name.startswith(".")]
        read = map_in_threads(partial(self._read, store, own), others)
        yield from ((name, config) for name, config in zip(others, read, strict=True) if config)

    def _read(self, store: ArtifactStore, own: set[str], name: str) -> Mapping[str, Any]:
        """Return a configuration; empty where nothing can start from a version of this run."""
        config, path = dict[str, Any](), f"{name}/config.yaml"
        try:
            version = str(sorted(store.filesystem.info(store.path_of(path)).items()))
            known = self._known.get(name)
            if known is not None and known[0] == version:
                return known[1]
            content = store.read_shared(path) or b""
        except (InputError, FileNotFoundError, NotADirectoryError):
            # Nothing can start there before a person has removed the link, the pipe or what else is in its place.
            return config
        # Parsing YAML is slow.
        if b"\nreplay:" in content or any(f"{run}@".encode() in content for run in own):
            with suppress(InputError):
                config = dict(_mapping(parse_yaml(content.decode(errors="replace"), name)))
        self._known[name] = version, config
        return config


def _is_unfinished(store: ArtifactStore, name: str, config: Mapping[str, Any]) -> bool:
    end = _mapping(config.get("run")).get("iterations")
    try:
        found = matching(store.filesystem, f"{store.root}/{name}/{POLICIES}", f"*{MANIFEST_ENDING}")
    except LinkError:
        return True
    numbers = [path.rsplit("/", 1)[-1].removesuffix(MANIFEST_ENDING) for path in found]
    done = max((int(number) for number in numbers if number.isdigit()), default=0)
    # One that does not say where it ends cannot be continued.
    return isinstance(end, int) and done < end
