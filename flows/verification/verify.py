"""The verification flow: choose stored stages, compute them again, and report how they compare."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from prefect import flow

from flows.pipeline.prefect_ui import VerifyForm, publish_report
from flows.pipeline.stages import recording
from flows.server.reachable import require_server
from flows.verification.choice import Candidate, read_tolerance
from flows.verification.opened import VerifyPlan, evidence_of, plan_verify
from flows.verification.recompute import Recomputation
from flows.verification.stored_stages import (
    StoredRun,
    StoredStage,
    artifact_of,
    stages_of_evaluation,
    stages_of_iteration,
    stages_of_rescoring,
)
from grpo_core.errors import InputError
from tasks.progress import log, progress_of
from tasks.reports.text import counted
from tasks.runs.layout import OTHER_EVALUATIONS, POLICIES, RESCORED, is_evaluation, parse_iteration
from tasks.runs.lookup import read_description
from tasks.runs.reader import RunReader
from tasks.runs.stored_policies import last_version
from tasks.storage.artifacts.store import LINEAGE, ArtifactStore
from tasks.storage.files import dump_checked, scratch_folder
from tasks.storage.roots import StorageError
from tasks.storage.run_lock import locked
from tasks.verification.card import verdict, verification_file, verification_report
from tasks.verification.checks import check_artifacts, check_sources, stored_artifacts
from tasks.verification.compare import DEFAULT_TOLERANCE
from tasks.verification.records import StageVerification, VerificationReport

_KEPT = 16
"""Iterations, evaluations and rescorings whose stages stay in memory: what explains a difference is near."""


class StagesOfRun:
    """The stages of a run by what they belong to, read when they are needed; the last few are kept."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._known: dict[tuple[str, int, str | None], tuple[StoredStage, ...]] = {}

    def of(self, candidate: Candidate) -> list[StoredStage]:
        """Return the stages that a candidate stands for."""
        kind, number, rescoring = candidate
        return [each for each in self._read(kind == "evaluation", number, rescoring) if each.kind == kind]

    def producer(self, folder: str) -> StoredStage | None:
        """Return the stage that made the artifact in a folder of the run; None for what is no stage of it."""
        parts = folder.split("/")
        name = parts[1] if parts[0] == RESCORED else None
        number = parse_iteration(parts[2] if name is not None else parts[0])
        if parts[0] == POLICIES or is_evaluation(folder):
            number = int(parts[1]) if parts[1].isdigit() else None
        if number is None or number < 1 + (parts[0] == POLICIES) * self._run.config.first_version:
            return None
        stages = self._read(is_evaluation(folder), number, name)
        return next((each for each in stages if each.folder == folder), None)

    def _read(self, evaluation: bool, number: int, rescoring: str | None) -> tuple[StoredStage, ...]:
        key = (str(evaluation), number, rescoring)
        if key not in self._known:
            if evaluation:
                self._known[key] = stages_of_evaluation(self._run, number)
            elif rescoring is not None:
                self._known[key] = stages_of_rescoring(self._run, rescoring, number)
            else:
                self._known[key] = stages_of_iteration(self._run, number)
            # They have the prompts of their plans.
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return self._known[key]


@flow(name="grpo verify", flow_run_name="{request.run}")
async def verify(request: VerifyForm) -> VerificationReport:
    """Compute stored stages again from their stored inputs, and compare; nothing in the run is changed."""
    started = time.perf_counter()
    plan = plan_verify(request)
    require_server()
    for note in (*plan.notes, f"verifying {plan.run.store.run}: {plan.chosen}"):
        log(note)
    run, problems = plan.run, [*plan.changed, *plan.problems]
    artifacts = stored_artifacts(run.reader) if plan.checks else []
    problems += check_artifacts(RunReader(run.store), artifacts)
    problems += check_sources(run.reader) if plan.checks else []
    evidence = evidence_of(plan)
    tolerance = read_tolerance(request.tolerance, DEFAULT_TOLERANCE if evidence.of_rounding is not None else 0.0)
    done: list[StageVerification] = []
    with scratch_folder() as folder:
        scratch = ArtifactStore(str(folder), run.store.run)
        with locked(scratch, setting="RUN", value=run.store.run) as lock:
            async with recording(scratch, lock):
                stages = StagesOfRun(run)
                recomputation = Recomputation(
                    store=run.store,
                    scratch=folder,
                    producer=stages.producer,
                    placement=run.config.placement,
                    tolerance=tolerance,
                    evidence=evidence,
                    trust=request.trust_code,
                    problems=run.problems,
                )
                complete = compute_all(plan, stages, recomputation, done)
    report = VerificationReport(
        run=run.store.run,
        lineage=read_description(run.store).get(LINEAGE),
        policies=_verified_policies(run, done),
        last_version=last_version(run.store),
        fingerprints=evidence.recorded,
        made_by=tuple(evidence.made_by),
        verified_by=evidence.verified_by,
        at=datetime.now(UTC).replace(microsecond=0),
        artifacts=len(artifacts),
        problems=tuple(dict.fromkeys([*problems, *run.problems])),
        stages=tuple(done),
        chosen=plan.chosen,
        tolerance=tolerance,
        complete=complete,
        seconds=time.perf_counter() - started,
    )
    keep_report(run.store, report)
    await publish_report(verification_report(report, title=verdict(report)), f"verify-{report.run}")
    return report


def compute_all(
    plan: VerifyPlan, stages: StagesOfRun, recomputation: Recomputation, done: list[StageVerification]
) -> bool:
    """Compute what was chosen again, and add what is found to `done`; False if it was interrupted or a disk is full."""
    report_progress = progress_of("verified", len(plan.candidates))
    try:
        for number, candidate in enumerate(plan.candidates, start=1):
            for stage in stages.of(candidate):
                recomputation.verify(stage)
            report_progress(number)
        done[:] = recomputation.found.values()
        if any(kind == "evaluation" for kind, _, _ in plan.candidates):
            done += other_evaluations(plan.run)
    except (KeyboardInterrupt, StorageError) as error:
        done[:] = recomputation.found.values()
        log(f"stopped after {counted(len(done), 'stage')}: {str(error) or 'interrupted'}")
        return False
    return True


def other_evaluations(run: StoredRun) -> list[StageVerification]:
    """Return the evaluations with other prompts or settings than the run's, which it does not record."""
    folders = [f"{OTHER_EVALUATIONS}/{name}" for name in run.reader.names(OTHER_EVALUATIONS)]
    reason = "its prompts and settings were given to `grpo evaluate`, and the run does not record them"
    return [
        StageVerification(kind="evaluation", title=folder, folder=folder, level="untried", reason=reason)
        for folder in folders
    ]


def _verified_policies(run: StoredRun, done: Sequence[StageVerification]) -> dict[int, str]:
    """Return the digest of the weights of each version whose update was computed; of pruned ones nobody knows it."""
    versions = sorted(int(each.folder.rpartition("/")[2]) for each in done if each.kind == "update")
    found = {version: run.policy(version) for version in versions}
    return {
        version: each.digest for version, each in found.items() if run.store.pruned_reason(artifact_of(each)) is None
    }


def keep_report(store: ArtifactStore, report: VerificationReport) -> None:
    """Keep the report beside the runs, where exports find it; a root that cannot be written has none."""
    folder, _, name = verification_file(store.run).rpartition("/")
    try:
        # As a run of its own: nothing of the verified one is touched, not even its folder of unfinished files.
        ArtifactStore(store.url, folder).write_file(name, dump_checked(report.model_dump(mode="json")))
    except (StorageError, OSError, InputError) as error:
        log(f"the report is not kept beside the run, whose root cannot be written: {error}")
