"""What goes of one run by the rules, and what stays although the rules would let it go, with the reason."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from configs.schema import RunConfig, TextRolloutSection
from flows.pruning.needs import BEST, Needs, find_needs, rewards_of
from flows.pruning.request import Age, PruneRules
from flows.pruning.scheduled import ScheduledFlow
from tasks.pruning.images import image_bytes, remove_images
from tasks.pruning.leftovers import abandoned_writes, old_calls
from tasks.pruning.prunable import Prunable, State, bytes_of, look_at
from tasks.pruning.set_aside import folders_set_aside, remove_folder
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
from tasks.storage.artifacts.lineage import LINEAGE, lineage_of
from tasks.storage.artifacts.store import ArtifactStore

VERSIONS, IMAGES, HELDOUT_IMAGES = "policy versions", "images of iterations", "images of evaluations"
ASIDE, CALLS, WRITES = "set aside", "calls of work pools", "unfinished writes"
KINDS = (VERSIONS, IMAGES, HELDOUT_IMAGES, ASIDE, CALLS, WRITES)
"""Of what goes, in the order in which people are told."""

ENDS = "the first and the last evaluation are shown side by side"
UNSCORED = "its scores or advantages are not there whole"


@dataclass(frozen=True)
class Removal:
    """Something that goes.

    Attributes:
        kind: one of KINDS.
        size: bytes that this frees.
        carry_out: takes it away; done twice, it does nothing more.
    """

    kind: str
    size: int
    carry_out: Callable[[], object]


@dataclass(frozen=True)
class Staying:
    """Something that is needed still.

    Attributes:
        kind: one of KINDS.
        name: for people: a number, or a folder.
        reason: who needs it.
    """

    kind: str
    name: str
    reason: str


@dataclass
class RunPlan:
    """What pruning does to one run.

    Attributes:
        store: at the run.
        removals: in order.
        staying: what the rules would let go, in order.
        notes: what else people ought to know.
    """

    store: ArtifactStore
    deletions: list[Removal] = field(default_factory=list)
    kept_names: list[Staying] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def decide(self, kind: str, name: str, reasons: Sequence[str], remove: Callable[[], Removal]) -> None:
        """Let something go unless there are reasons to keep it."""
        if reasons:
            self.kept_names.append(Staying(kind, name, "; ".join(dict.fromkeys(reasons))))
        else:
            self.deletions.append(remove())


def plan_run(
    store: ArtifactStore, config: RunConfig, rules: PruneRules, scheduled: Sequence[ScheduledFlow], now: datetime
) -> RunPlan:
    """Look a run over; nothing is changed.

    Args:
        store: of the run.
        config: its own.
        rules: what may go.
        scheduled: by Prefect's server.
        now: what ages are counted from.
    """
    plan = RunPlan(store)
    versions = _stored_versions(store)
    alive = [version for version, held in versions.items() if held.state is State.WHOLE]
    requested = rules.last is not None or rules.images is not None
    needs = find_needs(store, config, alive, scheduled) if requested else Needs()
    _plan_versions(plan, config, rules, versions, needs, now)
    _plan_images(plan, config, rules, needs, now)
    _plan_set_aside(plan, rules.set_aside, now)
    _plan_leftovers(plan, now)
    return plan


def _stored_versions(store: ArtifactStore) -> dict[int, Prunable]:
    found = {version: look_at(store, policy_folder(version)) for version in RunReader(store).policies()}
    return {version: held for version, held in found.items() if held is not None}


def _plan_versions(
    plan: RunPlan,
    config: RunConfig,
    rules: PruneRules,
    versions: Mapping[int, Prunable],
    needs: Needs,
    now: datetime,
) -> None:
    alive = [version for version, held in versions.items() if held.state is State.WHOLE]
    sampling = config.run.staleness + 1
    last, damaged = _last_whole(plan.store, alive, max(rules.last or 0, sampling)) if rules.last else ([], [])
    for version, held in versions.items():
        kept = rules.last is None or version in last[: rules.last] or rules.keeps(version)
        if held.state is State.PRUNED or (held.state is State.WHOLE and kept):
            continue
        reasons = []
        if held.state is State.WHOLE:
            reasons += ["the next iterations are sampled by it"] if version in last[:sampling] else []
            reasons += ["it is damaged, and the next start makes it again"] if version in damaged else []
            reasons += needs.policies.get(version, [])
        plan.decide(VERSIONS, str(version), reasons, partial(_without_files, plan.store, held, rules, now))


def _last_whole(store: ArtifactStore, versions: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """The last versions whose every file is what it was, latest first, and the damaged ones among them."""
    whole: list[int] = []
    damaged: list[int] = []
    for version in reversed(versions):
        if len(whole) == count:
            break
        (whole if store.find(policy_folder(version)) is not None else damaged).append(version)
    return whole, damaged


def _without_files(store: ArtifactStore, held: Prunable, rules: PruneRules, now: datetime) -> Removal:
    pruned = _pruned(store, held, "files", rules.of_policies if rules.last else "", now)
    size = bytes_of(store, [store.path(f"{held.folder}/{name}") for name in held.files])
    return Removal(VERSIONS, size, lambda: store.replace_artifact(held.reference, None, pruned=pruned))


def _pruned(store: ArtifactStore, held: Prunable, removed: str, rule: str, now: datetime) -> Mapping[str, Any]:
    """What the manifest will say; a removal that was cut short ends as it began."""
    said = {"removed": removed, "by": f"grpo prune {rule}".strip(), "on": f"{now:%Y-%m-%d}"}
    return held.manifest.pruned or {**said, LINEAGE: lineage_of(store, held.folder)}


def _plan_images(plan: RunPlan, config: RunConfig, rules: PruneRules, needs: Needs, now: datetime) -> None:
    if isinstance(config.rollout, TextRolloutSection):
        if rules.images is not None:
            plan.notes.append("its rollouts are texts, which have no images")
        return
    drawn = {number: list(_rollouts(plan.store, number)) for number in RunReader(plan.store).iterations()}
    last = max((number for number, rounds in drawn.items() if rounds), default=0)
    for number, rounds in drawn.items():
        going = [held for held in rounds if _goes(held, rules.images, now, number, last)]
        reasons = needs.of_iteration(number)
        if going and not _is_scored(plan.store, config, number):
            reasons.append(UNSCORED)
        for held in going:
            _decide_images(plan, IMAGES, held, reasons, rules, now)
    for folder in [
        EVALUATIONS,
        *(f"{OTHER_EVALUATIONS}/{name}" for name in RunReader(plan.store).names(OTHER_EVALUATIONS)),
    ]:
        _plan_evaluations(plan, folder, rules, needs.evaluations if folder == EVALUATIONS else {}, now, last)


def _rollouts(store: ArtifactStore, number: int) -> Iterator[Prunable]:
    for folder in _rounds(store, number):
        if held := look_at(store, f"{folder}/{ROLLOUTS}"):
            yield held


def _rounds(store: ArtifactStore, number: int) -> list[str]:
    return RunReader(store).rounds(iteration_folder(number))


def _goes(held: Prunable, age: Age | None, now: datetime, number: int, last: int) -> bool:
    if held.state is State.WHOLE:
        return age is not None and age.reached(held.made, now, number, last)
    return held.state is State.CUT_SHORT


def _is_scored(store: ArtifactStore, config: RunConfig, number: int) -> bool:
    """Whether no stage of the iteration has to look at its images any more."""
    folders = _rounds(store, number)
    scores = [f"{folder}/{REWARDS}/{section.label}" for folder in folders for section in config.rewards]
    return all(store.find(each) is not None for each in [f"{folders[-1]}/{ADVANTAGES}", *scores])


def _plan_evaluations(
    plan: RunPlan, folder: str, rules: PruneRules, needed: Mapping[int, list[str]], now: datetime, last: int
) -> None:
    versions = RunReader(plan.store).evaluations(folder)
    looked_at = {version: look_at(plan.store, f"{folder}/{version:06d}/{ROLLOUTS}") for version in versions}
    found = {version: held for version, held in looked_at.items() if held is not None}
    rewards = rewards_of(plan.store, folder)
    best = max(rewards, key=rewards.__getitem__) if rewards else None
    for version, held in found.items():
        if not _goes(held, rules.images if rules.evaluations else None, now, version, last):
            continue
        reasons = [*([ENDS] if version in (min(found), max(found)) else []), *([BEST] if version == best else [])]
        reasons += needed.get(version, [])
        if plan.store.find(f"{folder}/{version:06d}/{ADVANTAGES}") is None:
            reasons.append(UNSCORED)
        _decide_images(plan, HELDOUT_IMAGES, held, reasons, rules, now)


def _decide_images(
    plan: RunPlan, kind: str, held: Prunable, reasons: Sequence[str], rules: PruneRules, now: datetime
) -> None:
    # What was cut short is partly gone already; to end it is all that can be done.
    reasons = reasons if held.state is State.WHOLE else []

    def removal() -> Removal:
        pruned = _pruned(plan.store, held, "images", rules.of_images if rules.images else "", now)
        return Removal(kind, image_bytes(plan.store, held), lambda: remove_images(plan.store, held, pruned))

    plan.decide(kind, stage_folder(held.folder), reasons, removal)


def _plan_set_aside(plan: RunPlan, age: Age | None, now: datetime) -> None:
    if age is None:
        return
    store = plan.store
    for each in folders_set_aside(store):
        if age.reached(each.since, now):
            reasons = ["the run's present configuration made it, and may take it back"] if each.returns else []
            remove = partial(Removal, ASIDE, each.size, partial(remove_folder, store, each.folder))
            plan.decide(ASIDE, each.folder, reasons, remove)


def _plan_leftovers(plan: RunPlan, now: datetime) -> None:
    store = plan.store
    for path in old_calls(store, now):
        plan.deletions.append(Removal(CALLS, bytes_of(store, [path]), partial(store.filesystem.rm_file, path)))
    for folder in abandoned_writes(store):
        size = bytes_of(store, store.filesystem.find(folder))
        # It looks once more whose they are.
        plan.deletions.append(Removal(WRITES, size, store.clear_abandoned))
