"""The training flow: rollouts, rewards, advantages, update; again and again, each stage kept."""

import time

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from configs.replay import CORRECTION, corrected
from configs.schema import RunConfig
from flows.drawing import Drawing, Drawn, drawing
from flows.history import TrainingHistory
from flows.parameters import TrainConfig
from flows.preparation import Run, open_run
from flows.sampling import collect_rollouts, compute_advantages, score_rewards
from flows.stages import named, recording
from flows.summary import TrainSummary, summarize
from flows.watch import find_signs, tell_signs
from tasks.draws import Draw
from tasks.progress import announce
from tasks.record import gather_metrics, has_metrics, write_metrics
from tasks.reports.iteration import IterationRecord, iteration_markdown, iteration_table
from tasks.storage.reference import PolicyRef
from tasks.update_policy import update_policy_task

TOLD = (("reward", "reward"), ("held-out", "heldout_reward"), ("KL", "kl"), ("entropy", "entropy"))


@flow(name="grpo train", flow_run_name="{config.run.name}")
async def train(config: TrainConfig) -> TrainSummary:
    """Run, or go on with, one training run."""
    started = time.perf_counter()
    with open_run(config) as run:
        history, policy = TrainingHistory(), run.base_policy
        async with recording(run.store, run.lock):
            with drawing(run, history, policy) as groups:
                evaluate(run, policy, history)
                for iteration in range(1, config.run.iterations + 1):
                    policy = await train_iteration(run, policy, iteration, groups, history)
                    if history.stopped_by(config, policy.version):
                        announce(f"stopped after iteration {iteration}, as watch.stop asks")
                        break
        return summarize(run, policy, history, time.perf_counter() - started)


async def train_iteration(
    run: Run, policy: PolicyRef, iteration: int, groups: Drawing, history: TrainingHistory
) -> PolicyRef:
    """Four stages from one policy version to the next, and what people see of them."""
    drawn = groups.take(iteration)
    policy = update_policy(run, policy, drawn, iteration)
    groups.know(policy)
    if is_evaluated(run.config, iteration):
        evaluate(run, policy, history)
    await report(run, history, iteration, policy, drawn)
    return policy


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


def update_policy(run: Run, policy: PolicyRef, drawn: Drawn, iteration: int) -> PolicyRef:
    """Stage 4; rows that an older version sampled count by their importance weights."""
    config, title = run.config, f"iteration {iteration}"
    stage = named(update_policy_task, title, config.placement)
    rollouts = tuple(draw.rollouts for draw in drawn.draws)
    stale = policy.version - drawn.policy.version
    update = corrected(run.update, CORRECTION) if stale else run.update
    return stage(policy, rollouts, drawn.advantages, run.model, update, config.run.seed, stale, title, config.placement)


async def report(
    run: Run,
    history: TrainingHistory,
    iteration: int,
    policy: PolicyRef,
    drawn: Drawn,
) -> None:
    """Gather the iteration's figures, show them in Prefect's UI once, and keep them."""
    assert policy.checkpoint is not None
    heldout = history.heldout.get(iteration)
    guardrails = history.guardrails.get(iteration)
    metrics = gather_metrics(drawn.draws, drawn.advantages, policy.checkpoint, heldout, guardrails)
    record = IterationRecord(
        iteration=iteration,
        draws=drawn.draws,
        advantages=drawn.advantages,
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
