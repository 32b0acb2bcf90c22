"""`grpo prune` and `run.keep_policies`: delete what a run can do without, and report what was kept and why."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime

from pydantic import BaseModel

from configs.schema import RunConfig
from flows.pruning.plan import KINDS, Needs, OtherConfigs, RunPlan, add_best, add_dependents, plan_run, plan_versions
from flows.pruning.request import PruneRequest, Retention, check_request
from grpo_core.errors import InputError
from tasks.progress import log
from tasks.pruning import FILES_REMOVED, Prunable, find_prunable, part_bytes
from tasks.reports.report import Report, Table
from tasks.reports.text import size
from tasks.runs.layout import LOCKED_APART, OTHER_EVALUATIONS, evaluation_folder, policy_folder
from tasks.runs.lookup import find_run
from tasks.runs.reader import RunReader
from tasks.runs.stored import stored_config
from tasks.runs.stored_policies import heldout_rewards
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import matching
from tasks.storage.run_lock import LOCK, RunLock, locked


class Deleted(BaseModel):
    """How much was deleted of one kind."""

    kind: str
    count: int
    bytes: int


class Kept(BaseModel):
    """Policy versions or folders that were kept although the rules would have deleted them."""

    kind: str
    names: list[str]
    reason: str


class PrunedRun(BaseModel):
    """What pruning did to one run, or would do; the notes say what else people should know."""

    run: str
    folder: str
    deleted: list[Deleted]
    kept: list[Kept]
    notes: list[str]


class PruneSummary(BaseModel):
    """What pruning did, or in a dry run would do, and the bytes that it freed."""

    dry_run: bool
    bytes: int
    runs: list[PrunedRun]

    def report(self) -> Report:
        """Return, run by run, what was deleted, and what was kept with the reason."""
        done = "would be deleted" if self.dry_run else "deleted"
        tables: list[Table] = []
        for run in self.runs:
            deleted = [(each.kind, each.count, each.bytes) for each in run.deleted] or [("nothing", 0, 0)]
            rows = [{"what": what, "how many": f"{count:,}", "frees": size(freed)} for what, count, freed in deleted]
            kept = [{"what": one.kind, "which": ", ".join(one.names), "why": one.reason} for one in run.kept]
            tables += [Table(f"{run.run}: {done}", rows), Table(f"{run.run}: kept", kept, ("which", "why"))]
        notes = [f"{run.run}: {note}" for run in self.runs for note in run.notes]
        notes += ["a dry run: nothing was changed"] if self.dry_run else []
        return Report("", tables=tables, notes=notes)


def prune(request: PruneRequest) -> PruneSummary:
    """Delete what the rules allow and nothing needs; a dry run only reports it.

    Raises:
        InputError: with the option, the value and the hint; nothing is changed then.
        StorageError: a disk or a bucket refuses it.
    """
    check_request(request)
    stores = [find_run(source, request.root) for source in request.sources]
    if len({store.path() for store in stores}) < len(stores):
        raise InputError("RUN", list(request.sources), "A run is named twice; name each once.")
    now = datetime.now(UTC)
    runs: list[PrunedRun] = []
    with ExitStack() as stack:
        locks = [[] if request.dry_run else stack.enter_context(_locked(store)) for store in stores]
        for store, held in zip(stores, locks, strict=True):
            plan = plan_run(store, stored_config(store), request.retention, now)
            if not request.dry_run:
                carry_out(plan, held)
            runs.append(_report(plan))
    freed = sum(each.bytes for run in runs for each in run.deleted)
    return PruneSummary(dry_run=request.dry_run, bytes=freed, runs=runs)


@contextmanager
def _locked(store: ArtifactStore) -> Iterator[list[RunLock]]:
    """Lock a run, and every part of it that an evaluation or a rescoring may be writing and reading."""
    with locked(store, setting="RUN", value=store.run) as run, locked_apart(store, LOCKED_APART) as parts:
        yield [run, *parts]


@contextmanager
def locked_apart(store: ArtifactStore, patterns: Sequence[str]) -> Iterator[list[RunLock]]:
    """Lock the folders of a run that match and have been locked before."""
    with ExitStack() as stack:
        locks = []
        for pattern in patterns:
            for path in matching(store.filesystem, store.path(), f"{pattern}/{LOCK}"):
                place = path.removesuffix(f"/{LOCK}").removeprefix(f"{store.path()}/")
                locks.append(stack.enter_context(locked(store, place, setting="RUN", value=f"{store.run}/{place}")))
        yield locks


def carry_out(plan: RunPlan, locks: Sequence[RunLock]) -> None:
    """Delete what the plan deletes; damaged artifacts are noted and left alone."""
    for deletion in list(plan.deleted):
        for lock in locks:
            lock.require_held()
        try:
            deletion.delete()
        except StaleReferenceError as error:
            # The next start finds the same, quarantines it, and runs its stage again.
            plan.notes.append(f"not touched, since it is damaged: {error}")
            plan.deleted.remove(deletion)


def _report(plan: RunPlan) -> PrunedRun:
    sizes = {kind: [each.size for each in plan.deleted if each.kind == kind] for kind in KINDS}
    return PrunedRun(
        run=plan.store.run,
        folder=plan.store.path(),
        deleted=[Deleted(kind=kind, count=len(each), bytes=sum(each)) for kind, each in sizes.items() if each],
        kept=[Kept(kind=kind, names=names, reason=reason) for (kind, reason), names in plan.kept.items()],
        notes=plan.notes,
    )


class PolicyKeeper:
    """Deletes policy versions of a run by the rules of `grpo prune`, one start of a training at a time."""

    def __init__(self, store: ArtifactStore, config: RunConfig, lock: RunLock) -> None:
        """Find the versions that are stored, if the run deletes any."""
        self._store, self._config, self._lock, self._written = store, config, lock, set[int]()
        self._configs = OtherConfigs()
        found = RunReader(store).policies() if config.run.keep_policies else []
        self._keeps_all = bool(found) and not self._deletes(found[-1])
        stored = {} if self._keeps_all else self._find(found)
        self._stored = {version for version, prunable in stored.items() if prunable.has_files}
        # An earlier start may have evaluated versions that are not due in this one.
        self._rewards = heldout_rewards(store) if self._stored else {}

    def delete_unneeded(self, version: int, heldout: Mapping[int, float]) -> None:
        """Delete what is not needed once this version is trained and, where that is due, evaluated."""
        section = self._config.run.keep_policies
        if section is None or self._keeps_all:
            return
        if not self._stored and not self._deletes(version):
            self._keeps_all = True
            return
        if version not in self._stored:
            self._written.add(version)
        self._stored.add(version)
        if version < max(self._stored):
            # A run that resumes passes its earlier iterations, and knows its best version when it has passed them all.
            return
        versions = self._find(sorted(self._stored))
        retention = Retention("run.keep_policies", section.last, section.every, section.best)
        self._rewards |= heldout
        needs = Needs()
        if retention.best:
            add_best(needs, self._rewards, list(versions))

        def planned() -> RunPlan:
            plan = RunPlan(self._store, retention, datetime.now(UTC), frozenset(self._written))
            plan_versions(plan, self._config, versions, needs)
            return plan

        if planned().deleted:
            add_dependents(needs, self._store, self._configs)
            self._carry_out(planned())

    def _carry_out(self, plan: RunPlan) -> None:
        for deletion in plan.deleted:
            version = int(deletion.name)
            patterns = (evaluation_folder(version), f"{OTHER_EVALUATIONS}/*/{version:06d}")
            # A version that an evaluation is using is deleted after a later iteration.
            with suppress(InputError), locked_apart(plan.store, patterns) as locks:
                single = RunPlan(plan.store, plan.retention, plan.now, deleted=[deletion])
                carry_out(single, [self._lock, *locks])
                self._stored.discard(version)
                for note in single.notes:
                    log(note)

    def _deletes(self, version: int) -> bool:
        """Whether versions as large as this one are deleted."""
        section, found = self._config.run.keep_policies, find_prunable(self._store, policy_folder(version))
        return bool(section and found and section.deletes(part_bytes(self._store, found, FILES_REMOVED)))

    def _find(self, versions: list[int]) -> dict[int, Prunable]:
        found = {version: find_prunable(self._store, policy_folder(version)) for version in versions}
        return {version: prunable for version, prunable in found.items() if prunable is not None}
