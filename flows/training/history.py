"""The history of a training flow: its evaluations, and the metrics of each iteration.

Evaluations look for reward hacking: a guardrail that falls while the reward rises.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from configs.schema import ReplayConfig, RunConfig
from flows.pipeline.run import Run, plan_heldout
from flows.pipeline.stages import emit_evaluated, emit_hacking_sign, evaluate_baselines, evaluate_policy
from tasks.metrics import WALL_TIME
from tasks.progress import log
from tasks.prompts.curriculum import PromptStatistics, read_statistics
from tasks.reports.iteration import IterationRecord
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.hacking import HackingSign, fallen_measures, hacking_verdict
from tasks.runs.layout import ADVANTAGES, REWARDS, ROLLOUTS, UPDATE, Baseline, SamplingRound, StoredEvaluation
from tasks.runs.read_run import gather_metrics, read_metrics, with_earlier
from tasks.runs.run_view import EvaluationView, RunHistory, rescoring_of
from tasks.runs.signs import HACKING, Sign, new_signs
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore

_RECENT = 10
"""How many of the last iterations say how long one takes."""


@dataclass(kw_only=True)
class TrainingHistory(RunHistory):
    """What a training flow has done, iteration by iteration; `read_history` reads that of a finished run.

    Attributes:
        iterations: one record per finished iteration; only the last one has its tables.
        sampled: advantages of the last sampled iterations, which may be ahead of the finished ones.
        fallen: guardrails that had fallen at the last evaluation while the reward rose.
        new_fallen: those that had not fallen at the evaluation before.
        since: when the current iteration began, on the clock of this process.
    """

    iterations: list[IterationRecord] = field(default_factory=list)
    evaluations: list[EvaluationView] = field(default_factory=list)
    signs: list[Sign] = field(default_factory=list)
    sampled: list[ArtifactRef] = field(default_factory=list)
    fallen: Sequence[HackingSign] = ()
    new_fallen: Sequence[HackingSign] = ()
    _taken: set[tuple[str, str]] = field(default_factory=set)
    since: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, run: Run) -> "TrainingHistory":
        """Begin the history of a run."""
        replay = run.config.replay.model_dump() if isinstance(run.config, ReplayConfig) else None
        return cls(
            name=run.config.run.name,
            folder=run.store.path(),
            trained_on=rescoring_of(replay),
            config=run.config.model_dump(mode="json"),
        )

    @property
    def last_advantages(self) -> ArtifactRef | None:
        """Advantages of the iteration that was sampled last; None before the first."""
        return self.sampled[-1] if self.sampled else None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of this run's own stages over all iterations, by stage."""
        by_stage: dict[str, float] = {}
        for record in self.iterations:
            for stage, seconds in record.seconds.items():
                by_stage[stage] = by_stage.get(stage, 0.0) + seconds
        return by_stage

    @property
    def pace(self) -> float | None:
        """Mean seconds of the last iterations that this start trained.

        The first, which may load the model, counts only alone and after an evaluation; None where none counts.
        """
        trained = [each for each in self.iterations[-_RECENT - 1 :] if _is_trained(each)]
        counted = trained[1:] or (trained if self.evaluations else [])
        return sum(each.metrics[WALL_TIME] for each in counted) / len(counted) if counted else None

    def lap(self) -> float:
        """Return the seconds since the current iteration began, and begin the next one."""
        before, self.since = self.since, time.perf_counter()
        return self.since - before

    def evaluation_of(self, version: int) -> EvaluationView | None:
        """Return the evaluation of a policy version; None without one."""
        return next((each for each in reversed(self.evaluations) if each.version == version), None)

    def add_sampled(self, run: Run, advantages: ArtifactRef) -> None:
        """Note the advantages of a sampled iteration, and forget those that the curriculum does not look at again."""
        self.sampled = [*self.sampled, advantages][-max(1, run.config.data.curriculum.window) :]

    def statistics(self, run: Run) -> PromptStatistics | None:
        """Rewards of the prompts within the curriculum's window; None when the curriculum is uniform."""
        curriculum = run.config.data.curriculum
        if curriculum.kind == "uniform":
            return None
        return read_statistics(run.store, self.sampled[-curriculum.window :])

    def reach(self, policy: PolicyRef) -> None:
        """Note the policy that the run has reached."""
        self.policy_version, self.policy_digest = policy.version, policy.digest

    def add_baselines(self, baselines: Mapping[Baseline, ArtifactRef]) -> None:
        """Add the means of images that no policy made, from the advantages of each."""
        means = {name: scored.metrics.get("reward") for name, scored in baselines.items()}
        self.baselines = {name: mean for name, mean in means.items() if mean is not None}

    def add_evaluation(self, config: RunConfig, version: int, done: StoredEvaluation) -> None:
        """Add the evaluation of a policy version, and look for guardrails that have fallen."""
        self.evaluations.append(EvaluationView.of(version, done))
        if config.guardrails.rewards:
            known = {sign.guardrail for sign in self.fallen}
            self.fallen = fallen_measures(self, config.guardrails)
            self.new_fallen = [sign for sign in self.fallen if sign.guardrail not in known]
        own = [sign for sign in self.signs if sign.name != HACKING]
        self.signs = [*own, *hacking_verdict(self).signs]

    def take_signs(self) -> list[Sign]:
        """Return the signs that no earlier call returned."""
        new = [sign for sign in self.signs if (sign.name, sign.subject) not in self._taken]
        self._taken |= {(sign.name, sign.subject) for sign in new}
        return new

    def add_iteration(
        self,
        store: ArtifactStore,
        iteration: int,
        rounds: tuple[SamplingRound, ...],
        advantages: ArtifactRef,
        update: ArtifactRef,
        *,
        replayed: bool = False,
    ) -> tuple[IterationRecord, bool]:
        """Add an iteration, of a replay too, by its stages' metrics; return its record, and whether to write it."""
        own = () if replayed else rounds
        previous = self.iterations[-1].metrics if self.iterations else None
        evaluation, earlier = self.evaluation_of(iteration), read_metrics(store, iteration)
        gathered = gather_metrics(own, advantages, update, evaluation, previous)
        metrics = with_earlier(gathered, earlier, self.lap())
        record = IterationRecord(
            iteration=iteration,
            rounds=rounds,
            advantages=advantages,
            # Stages compose their names anew each time.
            metrics={sys.intern(name): value for name, value in metrics.items()},
            heldout=evaluation.reward if evaluation else None,
            reused=_find_reused(store, own, advantages, update),
            stored=bool(earlier),
        )
        if self.iterations:
            # A long run has thousands of records, and what they refer to is on disk.
            self.iterations[-1] = replace(self.iterations[-1], rounds=(), advantages=None)
        self.iterations.append(record)
        self.signs += new_signs(self.iterations, self.stream, self.signs)
        return record, record.metrics != earlier


def _is_trained(record: IterationRecord) -> bool:
    """Whether this start trained the iteration; stored ones pass in a moment."""
    return not record.stored and UPDATE not in record.reused and WALL_TIME in record.metrics


def _find_reused(
    store: ArtifactStore, rounds: Sequence[SamplingRound], advantages: ArtifactRef, update: ArtifactRef
) -> dict[str, str]:
    """Return the name of the run that a stage's results were copied from, by stage; own results are left out."""
    stages = {
        ROLLOUTS: [each.rollouts for each in rounds],
        REWARDS: [scores for each in rounds for scores in each.rewards.values()],
        ADVANTAGES: [advantages],
        UPDATE: [update],
    }
    sources = {stage: [store.copied.get(each.folder) for each in parts] for stage, parts in stages.items()}
    return {stage: runs[0] for stage, runs in sources.items() if runs and runs[0] is not None and all(runs)}


def evaluate_now(run: Run, policy: PolicyRef, history: TrainingHistory) -> None:
    """Evaluate a policy on the held-out prompts, if there are any, and look for guardrails that have fallen."""
    plan = plan_heldout(run.config, run.heldout, policy.version)
    if plan is None:
        return
    if _is_lost(run, policy, plan):
        log(f"policy {policy.version} is not evaluated, because its files were deleted")
        return
    # A run that resumes passes its previous evaluations, whose events were sent.
    is_new = not read_metrics(run.store, max(policy.version, run.config.first_version + 1))
    if policy.version == 0:
        history.add_baselines(evaluate_baselines(run, plan))
    done = evaluate_policy(run, policy.averaged, plan)
    history.add_evaluation(run.config, policy.version, done)
    if is_new:
        emit_evaluated(run.config.run.name, policy, done)
        for sign in history.new_fallen:
            emit_hacking_sign(run.config.run.name, policy, sign)


def _is_lost(run: Run, policy: PolicyRef, plan: RolloutPlan) -> bool:
    """Whether held-out samples are missing whose policy was deleted, since they were not due or others were."""
    if policy.checkpoint is None or run.store.pruned_reason(policy.checkpoint) is None:
        return False
    return run.store.find(f"{plan.folder}/{ROLLOUTS}") is None
