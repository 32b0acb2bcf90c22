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
    delete_images,
    delete_moved,
    find_prunable,
    image_bytes,
    moved_folders,
    old_calls,
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
from tasks.storage.artifacts.store import ArtifactStore, lineage_of
from tasks.storage.artifacts.tombstones import LINEAGE, replace_artifact

VERSIONS, IMAGES, HELDOUT_IMAGES = "policy versions", "images of iterations", "images of evaluations"
MOVED, CALLS, WRITES = "previous and quarantined files", "calls of work pools", "unfinished writes"
KINDS = (VERSIONS, IMAGES, HELDOUT_IMAGES, MOVED, CALLS, WRITES)
"""What pruning deletes, in the order of its report."""

ENDS = "the first and the last evaluation are shown side by side"
UNSCORED = "its scores or advantages are not complete"


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

    def decide_images(self, kind: str, prunable: Prunable, reasons: Sequence[str]) -> None:
        """Delete the images of rollouts unless there are reasons to keep them."""
        tombstone = self.tombstone(prunable, "images", f"grpo prune {self.request.image_rule}")
        delete = partial(delete_images, self.store, prunable, tombstone)
        # An interrupted deletion can only be finished, since some images are gone.
        reasons = reasons if prunable.is_complete else []
        self.decide(kind, stage_folder(prunable.folder), reasons, partial(image_bytes, self.store, prunable), delete)

    def tombstone(self, prunable: Prunable, removed: str, by: str) -> Mapping[str, Any]:
        """Describe a deletion for the manifest; one that was interrupted keeps its own description."""
        pruned = {"removed": removed, "by": by.strip(), "on": f"{self.now:%Y-%m-%d}"}
        return prunable.manifest.pruned or {**pruned, LINEAGE: lineage_of(self.store, prunable.folder)}

    def images_are_due(self, prunable: Prunable, age: str | None, number: int, last: int) -> bool:
        """Return whether the rules delete the images of an iteration, or of the evaluation of a policy version."""
        if not prunable.is_complete:
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
    needed = request.last is not None or request.images_older_than is not None
    needs = find_needs(store, config, complete, scheduled) if needed else Needs()
    plan_versions(plan, config, versions, needs)
    _plan_images(plan, config, needs)
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


def _plan_images(plan: RunPlan, config: RunConfig, needs: Needs) -> None:
    age = plan.request.images_older_than
    if isinstance(config.rollout, TextRolloutSection):
        if age is not None:
            plan.notes.append("its rollouts are texts, which have no images")
        return
    store, reader = plan.store, RunReader(plan.store)
    rounds = {number: reader.rounds(iteration_folder(number)) for number in reader.iterations()}
    found = {
        number: [prunable for each in folders if (prunable := find_prunable(store, f"{each}/{ROLLOUTS}")) is not None]
        for number, folders in rounds.items()
    }
    last = max((number for number, rollouts in found.items() if rollouts), default=0)
    for number, rollouts in found.items():
        due = [prunable for prunable in rollouts if plan.images_are_due(prunable, age, number, last)]
        reasons = needs.of_iteration(number)
        scores = [f"{folder}/{REWARDS}/{section.label}" for folder in rounds[number] for section in config.rewards]
        # An incomplete stage of the iteration still needs its images.
        if due and any(store.find(each) is None for each in [f"{rounds[number][-1]}/{ADVANTAGES}", *scores]):
            reasons.append(UNSCORED)
        for prunable in due:
            plan.decide_images(IMAGES, prunable, reasons)
    for folder in [EVALUATIONS, *(f"{OTHER_EVALUATIONS}/{name}" for name in reader.names(OTHER_EVALUATIONS))]:
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
        if not plan.images_are_due(prunable, age, version, last):
            continue
        reasons = [ENDS] if version in (min(rollouts), max(rollouts)) else []
        reasons += [BEST] if version == best else []
        reasons += needed.get(version, [])
        if plan.store.find(f"{folder}/{version:06d}/{ADVANTAGES}") is None:
            reasons.append(UNSCORED)
        plan.decide_images(HELDOUT_IMAGES, prunable, reasons)
