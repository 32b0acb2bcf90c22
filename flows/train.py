"""The training flow: rollouts, rewards, advantages, update; again and again, each stage kept."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from prefect import Task, flow
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact
from prefect.context import SyncClientContext

from configs.schema import RunConfig
from flows.preparation import Run, open_run
from flows.summary import TrainSummary, summarize
from tasks.collect_rollouts import collect_rollouts_task
from tasks.compute_advantages import Draw, compute_advantages_task
from tasks.curriculum import PromptStatistics, read_statistics
from tasks.plan import RolloutPlan
from tasks.progress import announce
from tasks.record import gather_metrics, has_metrics, write_metrics
from tasks.reports.iteration import IterationRecord, iteration_markdown, iteration_table
from tasks.score_rewards import score_rewards_task
from tasks.storage.records import current_records, registered_records, use_records
from tasks.storage.reference import ArtifactRef, PolicyRef
from tasks.storage.store import use_store
from tasks.update_policy import update_policy_task

TOLD = (("reward", "reward"), ("held-out", "heldout_reward"), ("KL", "kl"), ("entropy", "entropy"))
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

    def statistics(self, run: Run) -> PromptStatistics | None:
        """How hard the prompts of the curriculum's window were; None where it does not ask."""
        curriculum = run.config.data.curriculum
        if curriculum.kind == "uniform":
            return None
        return read_statistics(run.store, [record.advantages for record in self.iterations[-curriculum.window :]])


@flow(name="grpo train", flow_run_name="{config.run.name}", validate_parameters=False)
async def train(config: RunConfig) -> TrainSummary:
    """Run, or go on with, one training run."""
    started = time.perf_counter()
    run = open_run(config)
    history = TrainingHistory()
    policy = run.base_policy
    async with recording(run):
        evaluate(run, policy, history)
        for iteration in range(1, config.run.iterations + 1):
            policy = await train_iteration(run, policy, iteration, history)
    return summarize(run, policy, history.iterations, history.heldout, time.perf_counter() - started)


async def train_iteration(run: Run, policy: PolicyRef, iteration: int, history: TrainingHistory) -> PolicyRef:
    """Four stages from one policy version to the next, and what people see of them."""
    draws, advantages = draw_groups(run, policy, iteration, history)
    policy = update_policy(run, policy, draws, advantages, iteration)
    if is_evaluated(run.config, iteration):
        evaluate(run, policy, history)
    await report(run, history, iteration, policy, draws, advantages)
    return policy


def draw_groups(
    run: Run, policy: PolicyRef, iteration: int, history: TrainingHistory
) -> tuple[tuple[Draw, ...], ArtifactRef]:
    """The first three stages; where asked, groups that teach nothing are replaced by others, a bounded number of times.

    Yu et al., 2025, DAPO (arXiv:2503.14476), section 3.2, dynamic sampling.
    """
    section, wanted = run.config.advantages, run.config.rollout.prompts_per_iteration
    draws: tuple[Draw, ...] = ()
    plans: tuple[RolloutPlan, ...] = ()
    count, statistics = wanted, history.statistics(run)
    for draw in range(1, section.max_draws + 1):
        plan = run.plan(iteration, draw, count, statistics, plans)
        rollouts = collect_rollouts(run, policy, plan)
        rewards = score_rewards(run, rollouts, plan)
        draws, plans = (*draws, (rollouts, rewards)), (*plans, plan)
        advantages = compute_advantages(run, draws, plan)
        count = wanted - int(advantages.metrics["groups_kept"])
        if section.constant_groups != "redraw" or count <= 0:
            break
    return draws, advantages


def evaluate(run: Run, policy: PolicyRef, history: TrainingHistory) -> None:
    """Sample and score the held-out prompts with fixed seeds: the first three stages again."""
    plan = run.evaluation_plan(policy.version)
    if plan is not None:
        rollouts = collect_rollouts(run, policy, plan)
        rewards = score_rewards(run, rollouts, plan)
        history.heldout[policy.version] = compute_advantages(run, ((rollouts, rewards),), plan)


def is_evaluated(config: RunConfig, iteration: int) -> bool:
    """Whether the policy that this iteration makes is drawn on the held-out prompts."""
    every = config.evaluate.every
    return iteration == config.run.iterations or (every > 0 and iteration % every == 0)


@asynccontextmanager
async def recording(run: Run) -> AsyncIterator[None]:
    """Tasks of this context keep their artifacts, and the records of them, in the run's folder."""
    use_store(run.store)
    use_records(await registered_records())
    # Without a client of the whole run each task opens one of its own, with a TLS context that takes longer than it.
    with SyncClientContext.get_or_create():
        yield


def collect_rollouts(run: Run, policy: PolicyRef, plan: RolloutPlan) -> ArtifactRef:
    """Stage 1."""
    config, stage = run.config, named(collect_rollouts_task, plan.title)
    return stage(policy, plan, run.model, config.rollout, run.needs_reference_while_sampling, config.placement)


def score_rewards(run: Run, rollouts: ArtifactRef, plan: RolloutPlan) -> ArtifactRef:
    """Stage 2."""
    stage = named(score_rewards_task, plan.title)
    return stage(rollouts, run.config.rewards, plan.folder, plan.title, run.config.placement)


def compute_advantages(run: Run, draws: tuple[Draw, ...], plan: RolloutPlan) -> ArtifactRef:
    """Stage 3."""
    stage = named(compute_advantages_task, plan.title)
    return stage(draws, run.config.rewards, run.config.advantages, plan.folder, plan.title)


def update_policy(
    run: Run, policy: PolicyRef, draws: tuple[Draw, ...], advantages: ArtifactRef, iteration: int
) -> PolicyRef:
    """Stage 4."""
    config, title = run.config, f"iteration {iteration}"
    stage = named(update_policy_task, title)
    rollouts = tuple(rollouts for rollouts, _ in draws)
    return stage(policy, rollouts, advantages, run.model, run.update, config.run.seed, 0, title, config.placement)


def named(stage: Task[P, R], title: str) -> Task[P, R]:
    """The stage's task under a name that says which iteration it belongs to."""
    return stage.with_options(task_run_name=f"{title}: {stage.name}", result_storage=current_records())


async def report(
    run: Run,
    history: TrainingHistory,
    iteration: int,
    policy: PolicyRef,
    draws: tuple[Draw, ...],
    advantages: ArtifactRef,
) -> None:
    """Gather the iteration's figures, show them in Prefect's UI once, and keep them."""
    assert policy.checkpoint is not None
    heldout = history.heldout.get(iteration)
    metrics = gather_metrics(draws, advantages, policy.checkpoint, heldout)
    record = IterationRecord(
        iteration=iteration,
        draws=draws,
        advantages=advantages,
        metrics=metrics,
        heldout=heldout.metrics.get("reward") if heldout else None,
    )
    history.iterations.append(record)
    announce(told(record, run.config.run.iterations))
    # A run that goes on passes by its former iterations; they have been reported.
    if not has_metrics(run.store, iteration) or iteration == run.config.run.iterations:
        await publish(run, history)
    write_metrics(run.store, iteration, metrics)


def told(record: IterationRecord, iterations: int) -> str:
    """The iteration in one line."""
    parts = [f"{title} {record.metrics[name]:.3f}" for title, name in TOLD if name in record.metrics]
    return f"iteration {record.iteration}/{iterations}: {', '.join(parts)}, {record.metrics['step_time']:.1f} s"


async def publish(run: Run, history: TrainingHistory) -> None:
    """Leave the last iteration's report and table in Prefect's UI."""
    name, record = run.config.run.name, history.iterations[-1]
    key = f"grpo-{name}".lower().replace(".", "-").replace("_", "-")
    title = f"{name}, iteration {record.iteration}"
    markdown = iteration_markdown(run.store, name, history.iterations)
    await acreate_markdown_artifact(markdown, key=f"{key}-report", description=title)
    await acreate_table_artifact(iteration_table(record), key=f"{key}-metrics", description=title)
