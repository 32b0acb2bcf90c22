"""Evaluate a policy on the held-out prompts while it trains."""

from configs.schema import RunConfig
from flows.pipeline.run import Run
from flows.pipeline.stages import collect_rollouts, compute_advantages, score_rewards
from flows.training.guardrails import find_hacking_signs, report_hacking_signs
from flows.training.history import TrainingHistory
from tasks.runs.layout import GUARDRAILS, REWARDS
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import PolicyRef


def evaluate(run: Run, policy: PolicyRef, history: TrainingHistory) -> None:
    """Sample and score the held-out prompts with fixed seeds: the first three stages again."""
    plan = run.evaluation_plan(policy.version)
    if plan is not None:
        rollouts = collect_rollouts(run, policy, plan)
        rewards = score_rewards(run, rollouts, plan, run.config.rewards, REWARDS)
        rounds = (SamplingRound(rollouts, rewards),)
        history.heldout[policy.version] = compute_advantages(run, rounds, plan.folder, plan.title)
        watched = run.config.watch
        history.guardrails[policy.version] = score_rewards(run, rollouts, plan, watched.guardrails, GUARDRAILS)
        history.signs = find_hacking_signs(watched, history.heldout, history.guardrails)
        if watched.guardrails:
            report_hacking_signs(
                run.store, policy.version, history.signs, stop=history.stopped_by(run.config, policy.version)
            )


def is_evaluated(config: RunConfig, iteration: int) -> bool:
    """Whether the policy that this iteration makes is drawn on the held-out prompts."""
    every = config.evaluate.every
    return iteration == config.run.iterations or (every > 0 and iteration % every == 0)
