"""The history of a training flow: its evaluations, and the metrics of each iteration.

Evaluations look for reward hacking: a guardrail that falls while the reward rises.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from configs.schema import RunConfig
from flows.evaluation.evaluate import evaluate_baselines, evaluate_policy
from flows.pipeline.events import emit_evaluated, emit_hacking_sign
from flows.pipeline.run import Run, plan_heldout
from flows.training.hooks import call_hook
from flows.training.pace import Pace, find_reused, name_reused
from flows.training.publication import Publisher
from grpo_core.rewards.hacking import HackingSign, hacking_signs
from tasks.progress import advance_run, log
from tasks.prompts.curriculum import PromptStatistics, read_statistics
from tasks.reports.iteration import IterationRecord
from tasks.reports.text import duration
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.layout import GUARDRAILS_PLOT, ROLLOUTS, UPDATE, Baseline
from tasks.runs.metrics_table import gather_metrics, read_metrics, with_earlier
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore

LOGGED_METRICS = (("reward", "reward"), ("held-out", "heldout_reward"), ("KL", "kl"), ("entropy", "entropy"))

Guardrails = Mapping[int, Mapping[str, ArtifactRef]]
"""Scores of the held-out samples, by policy version and label."""


@dataclass
class TrainingHistory:
    """The finished iterations and evaluations of a training flow.

    Attributes:
        iterations: one record per finished iteration.
        sampled: advantages of the sampled iterations, which may be ahead of the finished ones.
        heldout: held-out advantages by policy version.
        baselines: advantages of the images that no policy made.
        guardrails: scores of the held-out samples by policy version and guardrail.
        signs: guardrails that had fallen at the last evaluation while the reward rose.
        since: when the current iteration began, on the clock of this process.
        pace: how fast this start trains.
        stop_reason: why the hook of `on_iteration` ends the run; None while it does not.
        new_signs: those that had not fallen at the evaluation before.
    """

    iterations: list[IterationRecord] = field(default_factory=list)
    sampled: list[ArtifactRef] = field(default_factory=list)
    heldout: dict[int, ArtifactRef] = field(default_factory=dict)
    baselines: Mapping[Baseline, ArtifactRef] = field(default_factory=dict)
    guardrails: dict[int, Mapping[str, ArtifactRef]] = field(default_factory=dict)
    signs: list[HackingSign] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)
    pace: Pace = field(default_factory=Pace)
    stop_reason: str | None = None
    new_signs: list[HackingSign] = field(default_factory=list)

    @property
    def last_advantages(self) -> ArtifactRef | None:
        """Advantages of the iteration that was sampled last; None before the first."""
        return self.sampled[-1] if self.sampled else None

    def lap(self) -> float:
        """Return the seconds since the current iteration began, and begin the next one."""
        before, self.since = self.since, time.perf_counter()
        return self.since - before

    def stopped_by(self, config: RunConfig, version: int) -> bool:
        """Whether a guardrail ends the run at this policy version, before its last iteration."""
        return bool(self.signs) and config.guardrails.on_fall == "stop" and version < config.run.iterations

    def statistics(self, run: Run) -> PromptStatistics | None:
        """Rewards of the prompts within the curriculum's window; None when the curriculum is uniform."""
        curriculum = run.config.data.curriculum
        if curriculum.kind == "uniform":
            return None
        return read_statistics(run.store, self.sampled[-curriculum.window :])


def is_evaluated(config: RunConfig, iteration: int) -> bool:
    """Whether the policy that this iteration makes is evaluated."""
    every = config.evaluate.every
    return iteration == config.run.iterations or (every > 0 and iteration % every == 0)


def evaluate(run: Run, policy: PolicyRef, history: TrainingHistory) -> None:
    """Evaluate a policy on the held-out prompts, if there are any, and look for guardrails that have fallen."""
    plan = plan_heldout(run.config, run.heldout, policy.version)
    if plan is None:
        return
    if _is_lost(run, policy, plan):
        log(f"policy {policy.version} is not evaluated, because its files were deleted")
        return
    # A run that resumes passes its previous evaluations, whose events were sent.
    is_new = not read_metrics(run.store, max(policy.version, 1))
    if policy.version == 0:
        history.baselines = evaluate_baselines(run, plan)
    done, section = evaluate_policy(run, policy.averaged, plan), run.config.guardrails
    history.heldout[policy.version], history.guardrails[policy.version] = done.advantages, done.guardrails
    if is_new:
        emit_evaluated(run.config.run.name, policy, done)
    if section.rewards:
        known = {sign.guardrail for sign in history.signs}
        history.signs = list(hacking_signs(*held_out_series(history.heldout, history.guardrails), section))
        history.new_signs = [sign for sign in history.signs if sign.guardrail not in known]
        for sign in history.new_signs if is_new else ():
            emit_hacking_sign(run.config.run.name, policy, sign)


def _is_lost(run: Run, policy: PolicyRef, plan: RolloutPlan) -> bool:
    """Whether held-out samples are missing whose policy was deleted, since they were not due or others were."""
    if policy.checkpoint is None or run.store.pruned_reason(policy.checkpoint) is None:
        return False
    return run.store.find(f"{plan.folder}/{ROLLOUTS}") is None


def held_out_series(
    heldout: Mapping[int, ArtifactRef], guardrails: Guardrails
) -> tuple[list[int], list[float | None], dict[str, list[float | None]]]:
    """Return the evaluated versions, the mean reward of each, and the mean of each guardrail by label."""
    versions = sorted(version for version in heldout if guardrails.get(version))
    labels = list(guardrails[versions[0]]) if versions else []
    rewards = [heldout[version].metrics.get("reward") for version in versions]
    levels = {
        label: [guardrails[version][label].metrics.get(f"rewards/{label}/mean") for version in versions]
        for label in labels
    }
    return versions, rewards, levels


def write_guardrails_plot(store: ArtifactStore, heldout: Mapping[int, ArtifactRef], guardrails: Guardrails) -> str:
    """Plot the held-out reward above the guardrails and return the path of the image."""
    # The plotting library takes a second to import, which a run without guardrails does not need.
    from tasks.reports.reward_plots import plot_guardrails

    store.write_file(GUARDRAILS_PLOT, plot_guardrails(*held_out_series(heldout, guardrails)))
    return store.path(GUARDRAILS_PLOT)


async def report_iteration(
    run: Run,
    history: TrainingHistory,
    publisher: Publisher,
    policy: PolicyRef,
    rounds: tuple[SamplingRound, ...],
    advantages: ArtifactRef,
    *,
    replayed: bool = False,
) -> None:
    """Gather the metrics of an iteration, log one line, and begin to publish them.

    Rounds that were `replayed` are those of another run, which counts their metrics.
    """
    assert policy.checkpoint is not None
    iteration, iterations = policy.version, run.config.run.iterations
    heldout, guardrails = history.heldout.get(iteration), history.guardrails.get(iteration)
    previous = history.iterations[-1].metrics if history.iterations else None
    earlier = read_metrics(run.store, iteration)
    gathered = gather_metrics(() if replayed else rounds, advantages, policy.checkpoint, heldout, guardrails, previous)
    metrics = with_earlier(gathered, earlier, history.lap())
    record = IterationRecord(
        iteration=iteration,
        rounds=rounds,
        advantages=advantages,
        metrics=metrics,
        heldout=heldout.metrics.get("reward") if heldout else None,
        reused=find_reused(run.store, () if replayed else rounds, advantages, policy.checkpoint),
        stored=bool(earlier),
    )
    history.iterations.append(record)
    pace = history.pace.add(trained=UPDATE not in record.reused and not record.stored)
    advance_run(iteration, iterations, pace)
    log(format_progress_line(record, iterations, pace))
    # A run that resumes passes iterations whose metrics are stored as they are.
    if metrics != earlier or iteration == iterations:
        publisher.publish(history.iterations, format_progress_line(record, iterations))
    # After a resume it gets the previous iterations too, so that its decision is that of an undisturbed run.
    history.stop_reason = await call_hook(record)


def format_progress_line(record: IterationRecord, iterations: int, pace: float | None = None) -> str:
    """Format an iteration as one line of the log.

    Args:
        pace: seconds per iteration, for the time that is left; None if it is not known.
    """
    parts = [f"{title} {record.metrics[name]:.3f}" for title, name in LOGGED_METRICS if name in record.metrics]
    parts += [f"{sum(record.seconds.values()):.1f} s"] if record.seconds else []
    parts += [name_reused(record.reused)] if record.reused else []
    left = iterations - record.iteration
    parts += [f"about {duration(pace * left)} left"] if pace is not None and left else []
    return f"iteration {record.iteration}/{iterations}: {', '.join(parts)}"
