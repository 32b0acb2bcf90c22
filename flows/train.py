"""The training flow: rollouts, rewards, advantages, update; again and again, each stage kept."""

import time
from collections.abc import Mapping, Sequence

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from configs.reward_sections import RewardSection
from configs.schema import RunConfig
from flows.history import TrainingHistory
from flows.preparation import Run, open_run
from flows.stages import named, recording, score_side_by_side
from flows.summary import TrainSummary, summarize
from flows.watch import find_signs, tell_signs
from tasks.collect_rollouts import collect_rollouts_task
from tasks.compute_advantages import compute_advantages_task
from tasks.draws import Draw
from tasks.plan import RolloutPlan
from tasks.progress import announce
from tasks.record import gather_metrics, has_metrics, write_metrics
from tasks.reports.iteration import IterationRecord, iteration_markdown, iteration_table
from tasks.storage.reference import ArtifactRef, PolicyRef
from tasks.update_policy import update_policy_task

TOLD = (("reward", "reward"), ("held-out", "heldout_reward"), ("KL", "kl"), ("entropy", "entropy"))


@flow(name="grpo train", flow_run_name="{config.run.name}", validate_parameters=False)
async def train(config: RunConfig) -> TrainSummary:
    """Run, or go on with, one training run."""
    started = time.perf_counter()
    run = open_run(config)
    history = TrainingHistory()
    policy = run.base_policy
    async with recording(run.store):
        evaluate(run, policy, history)
        for iteration in range(1, config.run.iterations + 1):
            policy = await train_iteration(run, policy, iteration, history)
            if history.stopped_by(config, policy.version):
                announce(f"stopped after iteration {iteration}, as watch.stop asks")
                break
    return summarize(run, policy, history, time.perf_counter() - started)


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
        rewards = score_rewards(run, rollouts, plan, run.config.rewards, "rewards")
        draws, plans = (*draws, Draw(rollouts, rewards)), (*plans, plan)
        advantages = compute_advantages(run, draws, plan.folder, plan.title, history.advantages)
        count = wanted - int(advantages.metrics["groups_kept"])
        if section.constant_groups != "redraw" or count <= 0:
            break
    return draws, advantages


def evaluate(run: Run, policy: PolicyRef, history: TrainingHistory) -> None:
    """Sample and score the held-out prompts with fixed seeds: the first three stages again."""
    plan = run.evaluation_plan(policy.version)
    if plan is not None:
        rollouts = collect_rollouts(run, policy, plan)
        rewards = score_rewards(run, rollouts, plan, run.config.rewards, "rewards")
        draws = (Draw(rollouts, rewards),)
        history.heldout[policy.version] = compute_advantages(run, draws, plan.folder, plan.title)
        watched = run.config.watch
        history.guardrails[policy.version] = score_rewards(run, rollouts, plan, watched.guardrails, "guardrails")
        history.signs = find_signs(watched, history.heldout, history.guardrails)
        if watched.guardrails:
            tell_signs(run.store, policy.version, history.signs, stop=history.stopped_by(run.config, policy.version))


def is_evaluated(config: RunConfig, iteration: int) -> bool:
    """Whether the policy that this iteration makes is drawn on the held-out prompts."""
    every = config.evaluate.every
    return iteration == config.run.iterations or (every > 0 and iteration % every == 0)


def collect_rollouts(run: Run, policy: PolicyRef, plan: RolloutPlan) -> ArtifactRef:
    """Stage 1."""
    config, stage = run.config, named(collect_rollouts_task, plan.title)
    return stage(policy, plan, run.model, config.rollout, run.needs_reference_while_sampling, config.placement)


def score_rewards(
    run: Run, rollouts: ArtifactRef, plan: RolloutPlan, rewards: Sequence[RewardSection], place: str
) -> Mapping[str, ArtifactRef]:
    """Stage 2."""
    return score_side_by_side(rollouts, rewards, f"{plan.folder}/{place}", plan.title, run.config.placement)


def compute_advantages(
    run: Run, draws: tuple[Draw, ...], folder: str, title: str, earlier: ArtifactRef | None = None
) -> ArtifactRef:
    """Stage 3."""
    config, stage = run.config, named(compute_advantages_task, title)
    return stage(draws, config.rewards, config.advantages, folder, title, earlier)


def update_policy(
    run: Run, policy: PolicyRef, draws: tuple[Draw, ...], advantages: ArtifactRef, iteration: int
) -> PolicyRef:
    """Stage 4."""
    config, title = run.config, f"iteration {iteration}"
    stage = named(update_policy_task, title)
    rollouts = tuple(draw.rollouts for draw in draws)
    return stage(policy, rollouts, advantages, run.model, run.update, config.run.seed, 0, title, config.placement)


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
    metrics = gather_metrics(draws, advantages, policy.checkpoint, heldout, history.guardrails.get(iteration))
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
