"""The replay flow: a policy learns from rollouts that another run has stored; nothing is sampled to train on."""

import time

from prefect import flow

from configs.schema import corrected
from flows.pipeline.run import Run, open_run
from flows.pipeline.stages import compute_advantages, named, recording, update_policy
from flows.replay.request import ReplayPlan
from flows.training.evaluation import evaluate, is_evaluated
from flows.training.history import TrainingHistory
from flows.training.iteration_report import publish, told
from flows.training.summary import TrainSummary, summarize
from grpo_core.errors import InputError
from tasks.advantages.copy import copy_advantages_task
from tasks.progress import log
from tasks.reports.iteration import IterationRecord
from tasks.runs.layout import iteration_folder
from tasks.runs.metrics_table import gather_metrics, has_metrics, write_metrics
from tasks.runs.records import StoredIteration
from tasks.runs.stored import RECOMPUTED
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef


class ReplaySummary(TrainSummary):
    """The end of a replay.

    Attributes:
        source: run whose rollouts were learned from.
        source_iterations: of that run, one for each update.
        advantages: `stored`, `recomputed`, or a rescoring's name.
        max_staleness: versions between a row's policy and the one that was trained, at most.
        staleness: the greatest of any row that was trained on.
        rows_left_out: rows of all updates that were further away.
    """

    source: str
    source_iterations: list[int]
    advantages: str
    max_staleness: int
    staleness: int
    rows_left_out: int


@flow(name="grpo replay", flow_run_name="{plan.config.run.name}", validate_parameters=False)
async def replay(plan: ReplayPlan) -> ReplaySummary:
    """Train a policy from another run's stored rollouts, one update an iteration, in their order."""
    started = time.perf_counter()
    with open_run(plan.config) as run:
        history, policy = TrainingHistory(), plan.start or run.base_policy
        log(introduction(plan))
        async with recording(run.store, run.lock):
            evaluate(run, policy, history)
            for stored in plan.iterations:
                policy = await replay_iteration(run, plan, policy, stored, history)
                if history.stopped_by(plan.config, policy.version):
                    log(f"stopped after iteration {policy.version}, as watch.stop asks")
                    break
        summary = summarize(run, policy, history, time.perf_counter() - started)
    return _with_staleness(summary, plan, history)


def introduction(plan: ReplayPlan) -> str:
    """What is replayed, and how rows of other weights are treated, in one line."""
    config, section = plan.config, plan.config.replay
    first, last = section.iterations[0], section.iterations[-1]
    mismatch = section.correction if config.update.mismatch.mode == "none" else config.update.mismatch
    done = {"truncate": "truncated at", "mask": "left out beyond"}[mismatch.mode]
    return (
        f"replay of {section.source}, iterations {first} to {last}, {section.advantages} advantages, onto version "
        f"{section.policy}; rows of other weights count by exp(old - rollout) a {mismatch.level}, {done} "
        f"{mismatch.cap:g}, and not at all beyond {section.max_staleness} versions"
    )


async def replay_iteration(
    run: Run, plan: ReplayPlan, policy: PolicyRef, stored: StoredIteration, history: TrainingHistory
) -> PolicyRef:
    """One update from a stored iteration, and what people see of it."""
    iteration = policy.version + 1
    advantages = copy_advantages(run, plan, stored, iteration, history.advantages or plan.before)
    history.drawn.append(advantages)
    policy = train_policy(run, plan, policy, stored, advantages)
    if is_evaluated(run.config, iteration):
        evaluate(run, policy, history)
    await report(run, history, policy, stored, advantages)
    return policy


def copy_advantages(
    run: Run, plan: ReplayPlan, stored: StoredIteration, iteration: int, earlier: ArtifactRef | None
) -> ArtifactRef:
    """The advantages as they are stored, or computed anew from the stored rewards."""
    folder, title = iteration_folder(iteration), f"iteration {iteration}"
    if plan.config.replay.advantages != RECOMPUTED:
        return named(copy_advantages_task, title, plan.config.placement)(stored.advantages, folder)
    return compute_advantages(run, stored.rounds, folder, title, earlier)


def train_policy(
    run: Run, plan: ReplayPlan, policy: PolicyRef, stored: StoredIteration, advantages: ArtifactRef
) -> PolicyRef:
    """Update the policy, with importance weights if other weights sampled the rows."""
    rollouts = tuple(draw.rollouts for draw in stored.rounds)
    staleness = plan.config.replay.max_staleness
    own = all(digest == policy.digest for _, digest in stored.samplers)
    if not own and staleness == 0:
        hint = (
            f"No row is left: iteration {stored.number} was sampled by other weights than version {policy.version} "
            "has here, though its number may be the same. Allow at least 1."
        )
        raise InputError("--max-staleness", 0, hint)
    update = run.update if own else corrected(run.update, plan.config.replay.correction)
    return update_policy(run, policy, rollouts, advantages, update, staleness, f"iteration {policy.version + 1}")


async def report(
    run: Run, history: TrainingHistory, policy: PolicyRef, stored: StoredIteration, advantages: ArtifactRef
) -> None:
    """Keep the figures of what was done here; those of sampling and scoring stay with the source."""
    assert policy.checkpoint is not None
    iteration, config = policy.version, run.config
    heldout = history.heldout.get(iteration)
    metrics = gather_metrics((), advantages, policy.checkpoint, heldout, history.guardrails.get(iteration))
    record = IterationRecord(
        iteration=iteration,
        rounds=stored.rounds,
        advantages=advantages,
        metrics=metrics,
        heldout=heldout.metrics.get("reward") if heldout else None,
    )
    history.iterations.append(record)
    log(told(record, config.run.iterations))
    if not has_metrics(run.store, iteration) or iteration == config.run.iterations:
        await publish(run, history)
    write_metrics(run.store, iteration, metrics)


def _with_staleness(summary: TrainSummary, plan: ReplayPlan, history: TrainingHistory) -> ReplaySummary:
    section = plan.config.replay
    metrics = [record.metrics for record in history.iterations]
    return ReplaySummary(
        **summary.model_dump(),
        source=section.source,
        source_iterations=list(section.iterations),
        advantages=section.advantages,
        max_staleness=section.max_staleness,
        staleness=int(max(each.get("staleness/max", 0.0) for each in metrics)),
        rows_left_out=int(sum(each.get("rows_left_out", 0.0) for each in metrics)),
    )
