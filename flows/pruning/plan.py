"""What pruning deletes from one run, and what it keeps although the rules would delete it, with the reasons."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from configs.schema import RunConfig
from configs.sections import TextRolloutSection
from flows.pruning.needs import BEST, Needs, ScheduledFlow, find_needs
from flows.pruning.request import PruneRequest, read_age
from tasks.pruning import (
    Prunable,
    abandoned_writes,
    bytes_below,
    delete_moved,
    delete_part,
    find_prunable,
    has_states,
    image_bytes,
    moved_folders,
    old_calls,
    states_bytes,
)
from tasks.runs.layout import (
    ADVANTAGES,
    EVALUATIONS,
    OTHER_EVALUATIONS,
    REWARDS,
    ROLLOUTS,
    iteration_folder,
    policy_folder,
    stage_folder,
)
from tasks.runs.reader import RunReader
from tasks.runs.stored import heldout_rewards
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore, lineage_of
from tasks.storage.artifacts.tombstones import IMAGES_REMOVED, LINEAGE, STATES_REMOVED, replace_artifact

VERSIONS, IMAGES, HELDOUT_IMAGES = "policy versions", "images of iterations", "images of evaluations"
STEPS = "denoising steps of iterations"
MOVED, CALLS, WRITES = "previous and quarantined files", "calls of work pools", "unfinished writes"
KINDS = (VERSIONS, IMAGES, HELDOUT_IMAGES, STEPS, MOVED, CALLS, WRITES)
"""What pruning deletes, in the order of its report."""

ENDS = "the first and the last evaluation are shown side by side"
UNSCORED = "its scores or advantages are not complete"
UNTRAINED = "no policy has been trained on it"

_SIZES = {IMAGES_REMOVED: image_bytes, STATES_REMOVED: states_bytes}
"""Bytes that removing this part of rollouts frees."""


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
        now: what ages are counted from.
        by: the command or setting that deletes policy versions, for their tombstones; None: the request's options.
        trusted: versions that this process has written, whose files are not verified again.
        kept: names of what the rules would delete, by kind and reason.
        notes: what else people should know.
    """

    store: ArtifactStore
    request: PruneRequest
    now: datetime
    by: str | None = None
    trusted: frozenset[int] = frozenset()
    deleted: list[Deletion] = field(default_factory=list)
    kept: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def decide(
        self, kind: str, name: str, reasons: Sequence[str], size: Callable[[], int], delete: Callable[[], object]
    ) -> None:
        """Delete something unless there are reasons to keep it; `size` is called only if it is deleted."""
        if reasons:
            self.kept.setdefault((kind, "; ".join(dict.fromkeys(reasons))), []).append(name)
        else:
            self.deleted.append(Deletion(kind, name, size(), delete))

    def decide_part(self, kind: str, prunable: Prunable, removed: str, reasons: Sequence[str]) -> None:
        """Delete images or states of rollouts unless there are reasons to keep them."""

        def carry_out() -> None:
            # Found again: images and states of the same rollouts may both be due.
            found = find_prunable(self.store, prunable.folder)
            if found is None:
                raise StaleReferenceError(f"{self.store.run}/{prunable.folder}: it has no manifest")
            rule = self.request.image_rule if removed == IMAGES_REMOVED else self.request.states_rule
            delete_part(self.store, found, removed, self.tombstone(found, removed, f"grpo prune {rule}"))

        # An interrupted deletion can only be finished, since some of its files are gone.
        reasons = [] if removed in prunable.removed else reasons
        size = partial(_SIZES[removed], self.store, prunable)
        self.decide(kind, stage_folder(prunable.folder), reasons, size, carry_out)

    def tombstone(self, prunable: Prunable, removed: str, by: str) -> Mapping[str, Any]:
        """Describe a deletion for the manifest; one that was interrupted keeps its own description."""
        return {LINEAGE: lineage_of(self.store, prunable.folder), **prunable.described(removed, by.strip(), self.now)}

    def is_due(self, prunable: Prunable, removed: str, age: str | None, number: int, last: int) -> bool:
        """Return whether the rules delete this of an iteration, or of the evaluation of a policy version."""
        if removed in prunable.removed:
            return prunable.half_pruned
        found = read_age(age)
        return found is not None and found.reached(prunable.made, self.now, number, last)


def plan_run(
    store: ArtifactStore, config: RunConfig, request: PruneRequest, scheduled: Sequence[ScheduledFlow], now: datetime
) -> RunPlan:
    """Decide what to delete and what to keep; nothing is changed."""
    plan = RunPlan(store, request, now)
    found = {version: find_prunable(store, policy_folder(version)) for version in RunReader(store).policies()}
    versions = {version: prunable for version, prunable in found.items() if prunable is not None}
    complete = [version for version, prunable in versions.items() if prunable.is_complete]
    needed = any(rule is not None for rule in (request.last, request.images_older_than, request.states_older_than))
    needs = find_needs(store, config, complete, scheduled) if needed else Needs()
    plan_versions(plan, config, versions, needs)
    _plan_images(plan, config, needs)
    _plan_states(plan, needs)
    if (age := read_age(request.previous_older_than)) is not None:
        for each in moved_folders(store):
            if age.reached(each.since, now):
                reasons = ["the run's current configuration made it and may restore it"] if each.restorable else []
                delete = partial(delete_moved, store, each.folder)
                plan.decide(MOVED, each.folder, reasons, partial(int, each.size), delete)
    for path in old_calls(store, now):
        plan.decide(CALLS, path, [], partial(bytes_below, store, path), partial(store.filesystem.rm_file, path))
    for folder in abandoned_writes(store):
        # clear_abandoned checks once more whether their processes are gone.
        plan.decide(WRITES, folder, [], partial(bytes_below, store, folder), store.clear_abandoned)
    return plan


def plan_versions(plan: RunPlan, config: RunConfig, versions: Mapping[int, Prunable], needs: Needs) -> None:
    """Decide which of these policy versions are deleted."""
    store, request, sampling = plan.store, plan.request, config.run.staleness + 1
    # The last versions whose files are all valid, latest first, and the damaged ones among them.
    last: list[int] = []
    damaged: list[int] = []
    for version in reversed([version for version, prunable in versions.items() if prunable.is_complete]):
        if request.last is None or len(last) == max(request.last, sampling):
            break
        valid = version in plan.trusted or store.find(policy_folder(version)) is not None
        (last if valid else damaged).append(version)
    for version, prunable in versions.items():
        on_the_way = request.policies_every is not None and version % request.policies_every == 0
        if prunable.is_complete and (request.last is None or version in last[: request.last] or on_the_way):
            continue
        reasons = []
        if prunable.is_complete:
            reasons += ["the next iterations are sampled with it"] if version in last[:sampling] else []
            reasons += ["it is damaged, and the next start makes it again"] if version in damaged else []
            reasons += needs.policies.get(version, [])
        elif not prunable.half_pruned:
            continue
        tombstone = plan.tombstone(prunable, "files", plan.by or f"grpo prune {request.policy_rule}")
        delete = partial(replace_artifact, store, prunable.reference, None, pruned=tombstone)
        plan.decide(VERSIONS, str(version), reasons, partial(bytes_below, store, store.path(prunable.folder)), delete)


@dataclass(frozen=True)
class _Iteration:
    """The folders of an iteration's sampling rounds, and the rollouts that are there."""

    rounds: Sequence[str]
    rollouts: Sequence[Prunable]


def _iterations(store: ArtifactStore) -> tuple[dict[int, _Iteration], int]:
    """Return each iteration, and the number of the last one with rollouts."""
    reader, found = RunReader(store), {}
    for number in reader.iterations():
        rounds = reader.rounds(iteration_folder(number))
        rollouts = [find_prunable(store, f"{each}/{ROLLOUTS}") for each in rounds]
        found[number] = _Iteration(rounds, [each for each in rollouts if each is not None])
    return found, max((number for number, each in found.items() if each.rollouts), default=0)


def _plan_states(plan: RunPlan, needs: Needs) -> None:
    iterations, last = _iterations(plan.store)
    for number, iteration in iterations.items():
        reasons = needs.of_training(number)
        if find_prunable(plan.store, policy_folder(number)) is None:
            reasons.append(UNTRAINED)
        for each in iteration.rollouts:
            due = plan.is_due(each, STATES_REMOVED, plan.request.states_older_than, number, last)
            if due and (has_states(each) or each.half_pruned):
                plan.decide_part(STEPS, each, STATES_REMOVED, reasons)


def _plan_images(plan: RunPlan, config: RunConfig, needs: Needs) -> None:
    age, store = plan.request.images_older_than, plan.store
    if isinstance(config.rollout, TextRolloutSection):
        if age is not None:
            plan.notes.append("its rollouts are texts, which have no images")
        return
    iterations, last = _iterations(store)
    for number, iteration in iterations.items():
        due = [each for each in iteration.rollouts if plan.is_due(each, IMAGES_REMOVED, age, number, last)]
        reasons = needs.of_iteration(number)
        scores = [f"{folder}/{REWARDS}/{section.label}" for folder in iteration.rounds for section in config.rewards]
        # An incomplete stage of the iteration still needs its images.
        if due and any(store.find(each) is None for each in [f"{iteration.rounds[-1]}/{ADVANTAGES}", *scores]):
            reasons.append(UNSCORED)
        for each in due:
            plan.decide_part(IMAGES, each, IMAGES_REMOVED, reasons)
    for folder in [EVALUATIONS, *(f"{OTHER_EVALUATIONS}/{name}" for name in RunReader(store).names(OTHER_EVALUATIONS))]:
        _plan_evaluations(plan, folder, needs.evaluations if folder == EVALUATIONS else {}, last)


def _plan_evaluations(plan: RunPlan, folder: str, needed: Mapping[int, list[str]], last: int) -> None:
    age = plan.request.images_older_than if plan.request.evaluations else None
    rollouts = {
        version: prunable
        for version in RunReader(plan.store).evaluations(folder)
        if (prunable := find_prunable(plan.store, f"{folder}/{version:06d}/{ROLLOUTS}")) is not None
    }
    rewards = heldout_rewards(plan.store, folder)
    best = max(rewards, key=rewards.__getitem__) if rewards else None
    for version, prunable in rollouts.items():
        if not plan.is_due(prunable, IMAGES_REMOVED, age, version, last):
            continue
        reasons = [ENDS] if version in (min(rollouts), max(rollouts)) else []
        reasons += [BEST] if version == best else []
        reasons += needed.get(version, [])
        if plan.store.find(f"{folder}/{version:06d}/{ADVANTAGES}") is None:
            reasons.append(UNSCORED)
        plan.decide_part(HELDOUT_IMAGES, prunable, IMAGES_REMOVED, reasons)
