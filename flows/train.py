"""The training flow: rollouts, rewards, advantages, update; again and again, each stage kept."""

import time
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from prefect import Task, flow
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from configs.schema import RunConfig
from flows.preparation import Run, open_run
from flows.summary import TrainSummary, summarize
from tasks.collect_rollouts import collect_rollouts_task
from tasks.compute_advantages import compute_advantages_task
from tasks.plan import RolloutPlan
from tasks.record import write_iteration_metrics
from tasks.reports.iteration import IterationRecord, iteration_markdown, iteration_table
from tasks.score_rewards import score_rewards_task
from tasks.storage.records import current_records, registered_records, use_records
from tasks.storage.reference import ArtifactRef, PolicyRef
from tasks.storage.store import use_store
from tasks.update_policy import update_policy_task

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class TrainingHistory:
    """What the flow has seen so far.

    Attributes:
        iterations: one record an iteration.
        heldout: held-out advantages artifact by policy version.
    """

    iterations: list[IterationRecord] = field(default_factory=list)
    heldout: dict[int, ArtifactRef] = field(default_factory=dict)


@flow(name="grpo train", flow_run_name="{config.run.name}", validate_parameters=False)
async def train(config: RunConfig) -> TrainSummary:
    """Run, or go on with, one training run."""
    started = time.perf_counter()
    run = open_run(config)
    use_store(run.store)
    use_records(await registered_records())
    history = TrainingHistory()
    policy = run.base_policy
    evaluate(run, policy, history)
    for iteration in range(1, config.run.iterations + 1):
        plan = run.plan(iteration)
        rollouts, rewards, advantages = draw_and_score(run, policy, plan)
        policy = named(update_policy_task, plan)(
            policy,
            rollouts,
            advantages,
            run.model,
            config.update,
            config.run.seed,
            plan.title,
            config.placement,
        )
        if is_evaluated(config, iteration):
            evaluate(run, policy, history)
        await report(run, history, iteration, policy, (rollouts, rewards, advantages))
    return summarize(run, policy, history.iterations, history.heldout, time.perf_counter() - started)


def draw_and_score(run: Run, policy: PolicyRef, plan: RolloutPlan) -> tuple[ArtifactRef, ArtifactRef, ArtifactRef]:
    """The three stages before the update, which are also an evaluation: rollouts, rewards, advantages."""
    config = run.config
    rollouts = named(collect_rollouts_task, plan)(policy, plan, run.model, config.rollout, config.placement)
    rewards = named(score_rewards_task, plan)(rollouts, config.rewards, plan.folder, plan.title, config.placement)
    advantages = named(compute_advantages_task, plan)(
        rollouts, rewards, config.rewards, config.advantages, plan.folder, plan.title
    )
    return rollouts, rewards, advantages


def named(stage: Task[P, R], plan: RolloutPlan) -> Task[P, R]:
    """The stage's task under a name that says which iteration it belongs to."""
    return stage.with_options(task_run_name=f"{plan.title}: {stage.name}", result_storage=current_records())


def is_evaluated(config: RunConfig, iteration: int) -> bool:
    """Whether the policy that this iteration makes is drawn on the held-out prompts."""
    every = config.evaluate.every
    return iteration == config.run.iterations or (every > 0 and iteration % every == 0)


def evaluate(run: Run, policy: PolicyRef, history: TrainingHistory) -> None:
    """Draw and score the held-out prompts with fixed seeds."""
    plan = run.evaluation_plan(policy.version)
    if plan is not None:
        *_, history.heldout[policy.version] = draw_and_score(run, policy, plan)


async def report(
    run: Run,
    history: TrainingHistory,
    iteration: int,
    policy: PolicyRef,
    stages: tuple[ArtifactRef, ArtifactRef, ArtifactRef],
) -> None:
    """Keep the iteration's metrics and leave a report and a table in Prefect's UI."""
    assert policy.checkpoint is not None
    heldout = history.heldout.get(iteration)
    record = IterationRecord(
        iteration,
        *stages,
        metrics=write_iteration_metrics(run.store, iteration, [*stages, policy.checkpoint], heldout),
        heldout=heldout.metrics.get("reward") if heldout else None,
    )
    history.iterations.append(record)
    key = f"grpo-{run.config.run.name}".lower().replace(".", "-").replace("_", "-")
    title = f"{run.config.run.name}, iteration {iteration}"
    markdown = iteration_markdown(run.store, run.config.run.name, history.iterations)
    await acreate_markdown_artifact(markdown, key=f"{key}-report", description=title)
    await acreate_table_artifact(iteration_table(record), key=f"{key}-metrics", description=title)
