"""How a run calls its first three stages: for an iteration, or for an evaluation."""

from collections.abc import Mapping, Sequence

from configs.reward_sections import RewardSection
from flows.history import TrainingHistory
from flows.preparation import Run
from flows.stages import named, score_side_by_side
from tasks.collect_rollouts import collect_rollouts_task
from tasks.compute_advantages import compute_advantages_task
from tasks.draws import Draw
from tasks.placing.shards import clear_shards
from tasks.plan import RolloutPlan
from tasks.storage.reference import ArtifactRef, PolicyRef


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
    run: Run, draws: tuple[Draw, ...], folder: str, title: str, earlier: ArtifactRef | None = None
) -> ArtifactRef:
    """Stage 3."""
    config, stage = run.config, named(compute_advantages_task, title, run.config.placement)
    return stage(draws, config.rewards, config.advantages, folder, title, earlier, config.placement)
