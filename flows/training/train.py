"""The training flow: rollouts, rewards, advantages, update; again and again, each stage kept."""

import time

from prefect import flow

from configs.schema import CORRECTION, corrected
from flows.pipeline.forms import TrainConfig
from flows.pipeline.run import Run, open_run
from flows.pipeline.stages import recording, update_policy
from flows.training.evaluation import evaluate, is_evaluated
from flows.training.history import TrainingHistory
from flows.training.iteration_report import report
from flows.training.prefetch import RolloutPrefetcher, ScoredRollouts, prefetching
from flows.training.summary import TrainSummary, summarize
from tasks.progress import log
from tasks.storage.artifacts.reference import PolicyRef


@flow(name="grpo train", flow_run_name="{config.run.name}")
async def train(config: TrainConfig) -> TrainSummary:
    """Run, or go on with, one training run."""
    started = time.perf_counter()
    with open_run(config) as run:
        history, policy = TrainingHistory(), run.base_policy
        async with recording(run.store, run.lock):
            with prefetching(run, history, policy) as groups:
                evaluate(run, policy, history)
                for iteration in range(1, config.run.iterations + 1):
                    policy = await train_iteration(run, policy, iteration, groups, history)
                    if history.stopped_by(config, policy.version):
                        log(f"stopped after iteration {iteration}, as watch.stop asks")
                        break
        return summarize(run, policy, history, time.perf_counter() - started)


async def train_iteration(
    run: Run, policy: PolicyRef, iteration: int, groups: RolloutPrefetcher, history: TrainingHistory
) -> PolicyRef:
    """Four stages from one policy version to the next, and what people see of them."""
    drawn = groups.take(iteration)
    policy = train_policy(run, policy, drawn, iteration)
    groups.publish_policy(policy)
    if is_evaluated(run.config, iteration):
        evaluate(run, policy, history)
    await report(run, history, iteration, policy, drawn)
    return policy


def train_policy(run: Run, policy: PolicyRef, drawn: ScoredRollouts, iteration: int) -> PolicyRef:
    """Update the policy; rows that an older version sampled count by their importance weights."""
    rollouts = tuple(draw.rollouts for draw in drawn.rounds)
    stale = policy.version - drawn.policy.version
    update = corrected(run.update, CORRECTION) if stale else run.update
    return update_policy(run, policy, rollouts, drawn.advantages, update, stale, f"iteration {iteration}")
