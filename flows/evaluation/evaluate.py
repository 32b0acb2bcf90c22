"""The evaluation flow: the held-out prompts drawn with one policy version and fixed seeds, apart from any training."""

import time
from typing import Annotated

from prefect import flow
from prefect.artifacts import acreate_table_artifact
from pydantic import BaseModel

from flows.evaluation.request import EvaluatePlan, EvaluateRequest, read_request
from flows.pipeline.forms import Form
from flows.pipeline.run import Run
from flows.pipeline.stages import collect_rollouts, compute_advantages, recording, score_rewards
from tasks.progress import log
from tasks.runs.layout import GUARDRAILS, REWARDS
from tasks.runs.records import SamplingRound, StoredEvaluation
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.locks.run_lock import locked

EvaluateForm = Annotated[EvaluateRequest, Form(EvaluateRequest, read_request)]


class RewardMetrics(BaseModel):
    """What one reward gave.

    Attributes:
        mean: of the samples that it scored; None where it scored none.
        std: of the same; None below two.
        without: samples that it gives no value, for which it is not meant or which it could not score.
        failed: those among them that it could not score.
    """

    mean: float | None
    std: float | None
    without: int
    failed: int


class EvaluateSummary(BaseModel):
    """The end of an evaluation.

    Attributes:
        run: whose policy it is.
        policy: version; 0 is the model as it was given.
        policy_digest: of the weights.
        prompts: file of the prompts; None for several.
        heldout: mean reward; None where no sample has one.
        rewards: by label.
        guardrails: by label; scored on the same samples, never trained on.
        samples: that were drawn.
        stored: everything was there already, and nothing was computed.
        seconds: `total` of this start, and of each stage as measured when it ran.
        folder: where the samples and their scores are.
    """

    run: str
    policy: int
    policy_digest: str
    prompts: str | None
    heldout: float | None
    rewards: dict[str, RewardMetrics]
    guardrails: dict[str, RewardMetrics]
    samples: int
    stored: bool
    seconds: dict[str, float]
    folder: str


@flow(name="grpo evaluate", flow_run_name="{request.run}")
async def evaluate(request: EvaluateForm) -> EvaluateSummary:
    """Sample and score held-out prompts with a version of a run's policy; nothing else of the run is changed."""
    started = time.perf_counter()
    plan = request.plan
    for note in plan.notes:
        log(note)
    done = plan.stored or await draw(plan)
    summary = summarize(plan, done, time.perf_counter() - started)
    await publish(summary)
    return summary


async def draw(plan: EvaluatePlan) -> StoredEvaluation:
    """The first three stages, and the guardrails."""
    config, rounds = plan.config, plan.rounds
    with locked(plan.store, rounds.folder, setting="--policy", value=str(plan.policy.version)) as lock:
        run = Run(config, plan.store, lock, plan.model, (), plan.heldout)
        async with recording(run.store, lock):
            rollouts = collect_rollouts(run, plan.policy, rounds)
            rewards = score_rewards(run, rollouts, rounds, config.rewards, REWARDS)
            advantages = compute_advantages(run, (SamplingRound(rollouts, rewards),), rounds.folder, rounds.title)
            guardrails = score_rewards(run, rollouts, rounds, config.watch.guardrails, GUARDRAILS)
    return StoredEvaluation(rollouts, advantages, rewards, guardrails)


def summarize(plan: EvaluatePlan, done: StoredEvaluation, seconds: float) -> EvaluateSummary:
    """Gather the figures."""
    rewards = {label: metrics_of(label, scores) for label, scores in done.rewards.items()}
    return EvaluateSummary(
        run=plan.store.run,
        policy=plan.policy.version,
        policy_digest=plan.policy.digest,
        prompts=plan.config.evaluate.prompts,
        heldout=done.advantages.metrics.get("reward"),
        rewards=rewards,
        guardrails={label: metrics_of(label, scores) for label, scores in done.guardrails.items()},
        samples=done.advantages.rows,
        stored=plan.stored is not None,
        seconds={
            "total": seconds,
            "rollouts": done.rollouts.seconds,
            # They are computed side by side.
            "rewards": max(scores.seconds for scores in done.rewards.values()),
            "advantages": done.advantages.seconds,
        },
        folder=plan.store.path(plan.rounds.folder),
    )


def metrics_of(label: str, scores: ArtifactRef) -> RewardMetrics:
    """The figures that a table of scores holds."""
    metrics = scores.metrics
    return RewardMetrics(
        mean=metrics.get(f"rewards/{label}/mean"),
        std=metrics.get(f"rewards/{label}/std"),
        without=int(metrics[f"rewards/{label}/null"]),
        failed=int(metrics[f"rewards/{label}/failed"]),
    )


async def publish(summary: EvaluateSummary) -> None:
    """Leave the rewards in Prefect's UI."""
    key = f"grpo-evaluate-{summary.run}".lower().replace(".", "-").replace("_", "-")
    rows = [
        {"": kind, "reward": label, **figures.model_dump()}
        for kind, group in (("reward", summary.rewards), ("guardrail", summary.guardrails))
        for label, figures in group.items()
    ]
    description = f"{summary.run}, policy {summary.policy}: held-out reward {summary.heldout}"
    await acreate_table_artifact(rows, key=key, description=description)
