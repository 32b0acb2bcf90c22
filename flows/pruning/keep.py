"""`run.keep_policies`: delete the policy versions that a training no longer needs, while it trains."""

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime

from flows.pipeline.run import Run
from flows.pruning.plan import Needs, RunPlan, add_best, add_dependents, plan_versions
from flows.pruning.prune import carry_out, locked_apart
from flows.pruning.request import Retention
from grpo_core.errors import InputError
from tasks.progress import log
from tasks.pruning import Prunable, find_prunable
from tasks.runs.layout import OTHER_EVALUATIONS, evaluation_folder, policy_folder
from tasks.runs.reader import RunReader
from tasks.runs.stored import heldout_rewards


class PolicyKeeper:
    """Deletes policy versions of a run by the rules of `grpo prune`, one start of a training at a time.

    Versions that the next iterations are sampled with stay, and so do those that another run starts from or that a
    `grpo evaluate` is using.
    """

    def __init__(self, run: Run) -> None:
        """Find the versions that are stored, if the run deletes any."""
        self._run, self._written = run, set[int]()
        found = RunReader(run.store).policies() if run.config.run.keep_policies else []
        self._stored = {version for version, prunable in self._find(found).items() if _has_files(prunable)}
        # An earlier start may have evaluated versions that are not due in this one.
        self._rewards = heldout_rewards(run.store) if self._stored else {}

    def delete_unneeded(self, version: int, heldout: Mapping[int, float]) -> None:
        """Delete what is not needed once this version is trained and, where that is due, evaluated.

        Args:
            heldout: mean held-out reward by policy version.
        """
        run, section = self._run, self._run.config.run.keep_policies
        if section is None:
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
        add_dependents(needs, run.store)
        plan = RunPlan(run.store, retention, datetime.now(UTC), frozenset(self._written))
        plan_versions(plan, run.config, versions, needs)
        self._carry_out(plan)

    def _carry_out(self, plan: RunPlan) -> None:
        for deletion in plan.deleted:
            version = int(deletion.name)
            patterns = (evaluation_folder(version), f"{OTHER_EVALUATIONS}/*/{version:06d}")
            # A version that an evaluation is using is deleted after a later iteration.
            with suppress(InputError), locked_apart(plan.store, patterns) as locks:
                single = RunPlan(plan.store, plan.retention, plan.now, deleted=[deletion])
                carry_out(single, [self._run.lock, *locks])
                self._stored.discard(version)
                for note in single.notes:
                    log(note)

    def _find(self, versions: list[int]) -> dict[int, Prunable]:
        found = {version: find_prunable(self._run.store, policy_folder(version)) for version in versions}
        return {version: prunable for version, prunable in found.items() if prunable is not None}


def _has_files(prunable: Prunable) -> bool:
    return prunable.is_complete or prunable.half_pruned
