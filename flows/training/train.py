"""The training loop.

One iteration, with the record that each stage passes on:

    policy v ---PolicyRef---> collect rollouts ---ArtifactRef---> score rewards ---{label: ArtifactRef}---+
                              (RolloutPlan)                       (one task per reward, concurrent)       |
                                                                                                          v
    policy v+1 <---PolicyRef--- update policy <---ScoredRollouts--- compute advantages <---SamplingRound--+

Each stage is one Prefect task. It reads artifacts, makes one call into grpo_core, writes one artifact and returns a
reference to it, never a tensor. A stage whose inputs and settings are unchanged is not run again: its stored artifact
is used, so an interrupted run resumes at the stage that it had reached.
"""

import time
from collections.abc import Mapping
from functools import partial

from prefect import flow

from configs.loader import as_config
from configs.schema import CORRECTION, RunConfig, corrected
from flows.pipeline.prefect_ui import TrainConfig
from flows.pipeline.run import Run, start_run
from flows.pipeline.stages import (
    choose_seeds,
    collect_rollouts,
    compute_advantages,
    recording,
    score_rewards,
    update_policy,
)
from flows.training.callbacks import open_callbacks
from flows.training.history import TrainingHistory, evaluate_now
from flows.training.prefetch import ScoredRollouts, prefetching
from flows.training.summary import TrainSummary, publish_summary, summarize
from tasks.metrics import stream_prefix
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.layout import REWARDS, SamplingRound
from tasks.storage.artifacts.reference import PolicyRef


@flow(name="grpo train", flow_run_name="{config.run.name}")
async def train(config: TrainConfig, accept_code: bool = False, overrides: tuple[str, ...] = ()) -> TrainSummary:
    """Start or resume a training run.

    Args:
        accept_code: keep stored results that other code made, and record it.
        overrides: change the configuration, as section.key=value; for runs of a deployment.
    """
    started = time.perf_counter()
    config = as_config(config, overrides) if overrides else config
    with start_run(config, accept_code=accept_code) as run:
        history, policy = TrainingHistory.of(run), run.base_policy
        sample = partial(sample_rollouts, run, history)
        async with recording(run.store, run.lock):
            with open_callbacks(run) as callbacks, prefetching(config.run, policy, sample) as prefetcher:
                evaluate_now(run, policy, history)
                callbacks.on_train_begin(history)
                for iteration in range(1, config.run.iterations + 1):
                    batch = prefetcher.next_batch(iteration)
                    policy = train_policy(run, policy, batch, iteration)
                    prefetcher.publish_policy(policy)
                    if config.is_evaluated(iteration):
                        evaluate_now(run, policy, history)
                    if await callbacks.on_iteration_end(history, policy, batch.rounds, batch.advantages):
                        break
        summary = summarize(run, history, time.perf_counter() - started)
        return await publish_summary(run, summary, callbacks.publisher.last_report)


def sample_rollouts(run: Run, history: TrainingHistory, policy: PolicyRef, iteration: int) -> ScoredRollouts:
    """Sample groups, score them, and compare siblings: stages 1 to 3.

    With `advantages.constant_groups: redraw`, groups without a difference in reward are replaced in further sampling
    rounds, up to `advantages.max_rounds` (Yu et al., 2025, DAPO, arXiv:2503.14476, section 3.2, dynamic sampling). With
    two streams every stream gets its groups, and keeps those of the other's further rounds.

    The history has the advantages of earlier iterations, which the curriculum and running moments need; it is extended.
    """
    section, prompts = run.config.advantages, run.config.rollout.prompts_per_iteration
    rounds: tuple[SamplingRound, ...] = ()
    plans: tuple[RolloutPlan, ...] = ()
    count, statistics = prompts, history.statistics(run)
    for sampling_round in range(1, section.max_rounds + 1):
        plan = run.plan(iteration, sampling_round, count, statistics, plans)
        plan, previews = choose_seeds(run, policy.sampler, plan)
        rollouts = collect_rollouts(run, policy.sampler, plan, run.config.rollout)
        rewards = score_rewards(run, rollouts, plan, run.config.rewards, REWARDS)
        rounds, plans = (*rounds, SamplingRound(rollouts, rewards, previews)), (*plans, plan)
        advantages = compute_advantages(run, rounds, plan.folder, plan.title, history.last_advantages)
        count = missing_prompts(run.config, advantages.metrics)
        if section.constant_groups != "redraw" or count <= 0:
            break
    history.add_sampled(run, advantages)
    return ScoredRollouts(policy, rounds, advantages)


def missing_prompts(config: RunConfig, kept: Mapping[str, float]) -> int:
    """Return how many prompts the stream still needs that has kept the fewest groups, by metrics of all rounds."""
    prompts = config.rollout.prompts_per_iteration
    groups = {stream: int(kept[f"{stream_prefix(stream, config.streams)}groups_kept"]) for stream in config.streams}
    return max(prompts - count // config.groups_per_prompt(stream) for stream, count in groups.items())


def train_policy(run: Run, policy: PolicyRef, batch: ScoredRollouts, iteration: int) -> PolicyRef:
    """Make one update, stage 4; rows of an older version, or of an engine in 16 bits, are weighted by importance."""
    staleness = policy.version - batch.policy.version
    updates = corrected(run.updates, CORRECTION) if staleness or run.config.rounds_apart else run.updates
    rollouts = tuple(each.rollouts for each in batch.rounds)
    return update_policy(run, policy, rollouts, batch.advantages, updates, staleness, f"iteration {iteration}")
