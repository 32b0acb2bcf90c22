"""How a run calls its first three stages: for an iteration, or for an evaluation."""

from collections.abc import Mapping, Sequence

from configs.reward_sections import RewardSection
from flows.pipeline.run import Run
from flows.pipeline.stages import named, score_side_by_side
from tasks.advantages.compute import compute_advantages_task
from tasks.execution.shards import clear_shards
from tasks.rollouts.collect import collect_rollouts_task
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef


def collect_rollouts(run: Run, policy: PolicyRef, plan: RolloutPlan) -> ArtifactRef:
    """Stage 1."""
    config, stage = run.config, named(collect_rollouts_task, plan.title, run.config.placement)
    made = stage(policy, plan, run.model, config.rollout, run.needs_reference_while_sampling, config.placement)
    if config.placement.rollouts.shards > 1:
        clear_shards(run.store, plan.folder)
    return made


def score_rewards(
    run: Run, rollouts: ArtifactRef, plan: RolloutPlan, rewards: Sequence[RewardSection], place: str
) -> Mapping[str, ArtifactRef]:
    """Stage 2."""
    return score_side_by_side(rollouts, rewards, f"{plan.folder}/{place}", plan.title, run.config.placement)


def compute_advantages(
    run: Run, rounds: tuple[SamplingRound, ...], folder: str, title: str, earlier: ArtifactRef | None = None
) -> ArtifactRef:
    """Stage 3."""
    config, stage = run.config, named(compute_advantages_task, title, run.config.placement)
    return stage(rounds, config.rewards, config.advantages, folder, title, earlier, config.placement)
