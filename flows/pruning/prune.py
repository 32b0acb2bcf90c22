"""`grpo prune`: what a run can do without goes, and people are told what was kept and why."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from pydantic import BaseModel

from flows.pruning.plan import KINDS, RunPlan, plan_run
from flows.pruning.request import PruneRequest, read_rules
from flows.pruning.scheduled import read_scheduled
from grpo_core.errors import InputError, InputErrors
from tasks.runs.layout import LOCKED_APART
from tasks.runs.lookup import find_run
from tasks.runs.stored import stored_config
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.locks.run_lock import LOCK, RunLock, locked


class PrunedKind(BaseModel):
    """What went of one kind.

    Attributes:
        kind: of what.
        count: how many.
        bytes: that this freed.
    """

    kind: str
    count: int
    bytes: int


class KeptKind(BaseModel):
    """What stayed although the rules would have let it go.

    Attributes:
        kind: of what.
        names: policy versions, or folders.
        reason: who needs it.
    """

    kind: str
    names: list[str]
    reason: str


class PrunedRun(BaseModel):
    """What pruning did to one run, or would do.

    Attributes:
        run: its name.
        folder: where it is kept.
        removed: by kind.
        kept: by reason.
        notes: what else people ought to know.
    """

    run: str
    folder: str
    removed: list[PrunedKind]
    kept: list[KeptKind]
    notes: list[str]


class PruneSummary(BaseModel):
    """What pruning did, or would do.

    Attributes:
        dry_run: nothing was changed.
        bytes: freed in all.
        schedules: whether a Prefect server was asked what it will run.
        runs: in the order in which they were named.
    """

    dry_run: bool
    bytes: int
    schedules: bool
    runs: list[PrunedRun]


def prune(request: PruneRequest) -> PruneSummary:
    """Take away what the rules let go and nothing needs; with a dry run, tell it alone.

    Raises:
        InputError, InputErrors: with the option, the value and the hint; nothing is changed then.
        StorageError: a disk or a bucket does not take it.
    """
    rules = read_rules(request)
    stores = _find_runs(request)
    scheduled = read_scheduled()
    now = datetime.now(UTC)
    done: list[PrunedRun] = []
    with ExitStack() as stack:
        locks = [[] if request.dry_run else stack.enter_context(_held(store)) for store in stores]
        for store, held in zip(stores, locks, strict=True):
            plan = plan_run(store, stored_config(store), rules, scheduled or (), now)
            told = _told(plan)
            if not request.dry_run:
                _carry_out(plan, held, told)
            done.append(told)
    freed = sum(each.bytes for run in done for each in run.removed)
    return PruneSummary(dry_run=request.dry_run, bytes=freed, schedules=scheduled is not None, runs=done)


def _find_runs(request: PruneRequest) -> list[ArtifactStore]:
    stores = [find_run(source, request.root) for source in request.sources]
    places = [store.path() for store in stores]
    if twice := sorted({place for place in places if places.count(place) > 1}):
        raise InputErrors([InputError("RUN", twice, "A run stands twice; name each once.")])
    return stores


@contextmanager
def _held(store: ArtifactStore) -> Iterator[list[RunLock]]:
    """Hold a run, and every part of it that an evaluation or a rescoring may be writing and reading at this moment.

    Raises:
        InputError: another process holds one of them.
    """
    with ExitStack() as stack:
        locks = [stack.enter_context(locked(store, setting="RUN", value=store.run))]
        for pattern in LOCKED_APART:
            for path in sorted(store.filesystem.glob(store.path(f"{pattern}/{LOCK}"))):
                place = str(path).rstrip("/").removesuffix(f"/{LOCK}").removeprefix(f"{store.path()}/")
                locks.append(stack.enter_context(locked(store, place, setting="RUN", value=f"{store.run}/{place}")))
        yield locks


def _carry_out(plan: RunPlan, locks: Sequence[RunLock], told: PrunedRun) -> None:
    for removal in plan.deletions:
        for lock in locks:
            lock.require_held()
        try:
            removal.carry_out()
        except StaleReferenceError as error:
            # The next start finds the same, sets it aside, and has its stage done again.
            told.notes.append(f"left as it is, since it is damaged: {error}")
            kind = next(each for each in told.removed if each.kind == removal.kind)
            kind.count, kind.bytes = kind.count - 1, kind.bytes - removal.size


def _told(plan: RunPlan) -> PrunedRun:
    sizes = {kind: [each.size for each in plan.deletions if each.kind == kind] for kind in KINDS}
    kept: dict[tuple[str, str], list[str]] = {}
    for each in plan.kept_names:
        kept.setdefault((each.kind, each.reason), []).append(each.name)
    return PrunedRun(
        run=plan.store.run,
        folder=plan.store.path(),
        removed=[PrunedKind(kind=kind, count=len(each), bytes=sum(each)) for kind, each in sizes.items() if each],
        kept=[KeptKind(kind=kind, names=names, reason=reason) for (kind, reason), names in kept.items()],
        notes=list(plan.notes),
    )
