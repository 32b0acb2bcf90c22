"""`grpo evaluate`: held-out samples of one policy version with fixed seeds, independent of any training."""

import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from prefect import flow
from pydantic import BaseModel

from configs.schema import RunConfig
from flows.pipeline.prefect_ui import EvaluateForm, publish_report
from flows.pipeline.run import Run, heldout_digest, plan_heldout
from flows.pipeline.stages import evaluate_policy, recording
from flows.preflight.files import checked_once, require_heldout
from flows.preflight.inputs import check_evaluation
from flows.preflight.trust import EVALUATED, requested_config
from flows.requests import EvaluateRequest
from grpo_core.errors import InputError
from tasks.models.resident import ModelSpec
from tasks.progress import log
from tasks.prompts.curriculum import PromptSet
from tasks.reports.report import Report, Table, seconds_facts
from tasks.reports.text import counted, number, relative
from tasks.rewards.score_rewards import scores_key
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.layout import StoredEvaluation, evaluation_folder
from tasks.runs.lookup import read_description
from tasks.runs.stored import find_evaluation, stored_config
from tasks.runs.stored_policies import choose_policy, chosen_version
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.run_lock import locked

# A reward's provenance covers its settings; these fields say how it is computed.
_WITHOUT_EFFECT = {"settings", "max_failures", "batch_size", "processes", "pool"}


@dataclass(frozen=True)
class EvaluatePlan:
    """What an evaluation does.

    Attributes:
        config: the run's configuration with the requested changes.
        rollouts: names and seeds of the samples, and the folder of the evaluation.
        stored: the same evaluation if it is stored and valid; nothing is computed then.
        notes: messages about versions that were skipped and about the prompts.
    """

    store: ArtifactStore
    config: RunConfig
    model: ModelSpec
    policy: PolicyRef
    heldout: tuple[PromptSet, ...]
    rollouts: RolloutPlan
    stored: StoredEvaluation | None
    notes: tuple[str, ...]


@checked_once
def plan_evaluate(request: EvaluateRequest) -> EvaluatePlan:
    """Find run, policy and prompts, and check that they fit; an InputError names each option or key."""
    store, config = requested_config(request, request.changes, EVALUATED)
    described, own = read_description(store), stored_config(store)
    require_heldout(config)
    inputs = check_evaluation(config)
    heldout, digest = inputs.heldout, inputs.model.digest
    if described.get("model_digest") not in (None, digest):
        hint = f"Its files have changed since {store.run} began ({described['model_digest'][:12]}); restore them."
        raise InputError("policy.model", digest[:12], hint)
    chosen, notes = choose_policy(store, chosen_version(store, request.named.version), digest)
    policy = chosen.averaged
    rollouts = plan_heldout(config, heldout, policy.version)
    assert rollouts is not None, "there are held-out prompts"
    same = _is_same(own, config) and described.get("evaluation") == heldout_digest(config, heldout)
    stored = find_evaluation(store, rollouts.folder, config, policy) if same else None
    if stored is None:
        folder = evaluation_folder(policy.version, _name_of(config, rollouts))
        rollouts = rollouts.model_copy(update={"folder": folder})
        stored = find_evaluation(store, folder, config, policy)
    return EvaluatePlan(store, config, inputs.model, policy, heldout, rollouts, stored, (*notes, *inputs.notes))


def _is_same(own: RunConfig, config: RunConfig) -> bool:
    determining = _determining(config)
    try:
        return _determining(own) == determining
    except InputError:
        # A file of the run is not on this machine, and another was given.
        return False


def _determining(config: RunConfig) -> dict[str, Any]:
    """Return what determines the samples and scores of an evaluation, except the prompts and the policy."""
    rewards, rollout = (*config.rewards, *config.guardrails.rewards), config.evaluation_rollout
    sampling = rollout.result_settings()
    return {
        "rollout": {name: value for name, value in sampling.items() if name not in rollout.training_settings},
        "mix": [section.model_dump(mode="json", exclude=_WITHOUT_EFFECT) for section in config.rewards],
        "scores": [[section.label, scores_key(section)] for section in rewards],
        "advantages": config.advantages.model_dump(mode="json"),
    }


def _name_of(config: RunConfig, rollouts: RolloutPlan) -> str:
    """Name an evaluation that is not the run's own; all versions share the name."""
    described = {
        **_determining(config),
        "plan": rollouts.model_dump(mode="json", exclude={"folder", "title", "iteration"}),
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    stem = PurePosixPath(config.evaluate.prompts).stem if config.evaluate.prompts else "heldout"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:60] or "heldout"
    return f"{name}-{digest[:8]}"


class RewardMetrics(BaseModel):
    """Statistics of one reward.

    Attributes:
        mean, std: of the samples that have a score; None without any, std also for one.
        without: samples without a score: the reward does not apply to them or could not score them.
        failed: samples that the reward could not score.
    """

    mean: float | None
    std: float | None
    without: int
    failed: int


class EvaluateSummary(BaseModel):
    """The results of an evaluation.

    Attributes:
        policy: policy version; 0 is the initial model.
        prompts: prompt file; None for several.
        heldout: mean reward; None when no sample has one.
        rewards, guardrails: statistics by label, on the same samples.
        stored: whether everything was stored already, so that nothing was computed.
        seconds: `total` for this start, and each stage as measured when it ran.
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

    def report(self) -> Report:
        """Return each reward and guardrail, the held-out reward, and where the samples are."""
        guardrails = {f"{label} (guardrail)": each for label, each in self.guardrails.items()}
        rows = [
            {
                "reward": label,
                "mean": number(each.mean),
                "std": number(each.std),
                "without": f"{each.without:,}",
                "failed": f"{each.failed:,}",
            }
            for label, each in {**self.rewards, **guardrails}.items()
        ]
        facts = [
            ("held-out reward", number(self.heldout)),
            ("policy digest", self.policy_digest[:16]),
            *seconds_facts(self.seconds),
            ("stored in", relative(self.folder)),
            *([("computed", "nothing: it was stored")] if self.stored else []),
        ]
        title = f"{self.run}, policy {self.policy}, {counted(self.samples, 'sample')}"
        return Report(title, facts, [Table("", rows)])


@flow(name="grpo evaluate", flow_run_name="{request.run}")
async def evaluate(request: EvaluateForm) -> EvaluateSummary:
    """Sample and score held-out prompts with a version of a run's policy; nothing else in the run is changed."""
    started = time.perf_counter()
    plan = plan_evaluate(request)
    for note in plan.notes:
        log(note)
    done = plan.stored
    if done is None:
        with locked(
            plan.store, plan.rollouts.folder, setting="RUN", value=f"{plan.store.run}@{plan.policy.version}"
        ) as lock:
            run = Run(plan.config, plan.store, lock, plan.model, (), plan.heldout)
            async with recording(run.store, lock):
                done = evaluate_policy(run, plan.policy, plan.rollouts)
    summary = evaluate_summary(plan, done, time.perf_counter() - started)
    await publish_report(summary.report(), f"evaluate-{summary.run}")
    return summary


def evaluate_summary(plan: EvaluatePlan, done: StoredEvaluation, seconds: float) -> EvaluateSummary:
    """Gather the summary of an evaluation that is stored."""
    rewards = {label: metrics_of(label, scores) for label, scores in done.rewards.items()}
    return EvaluateSummary(
        run=plan.store.run,
        policy=plan.policy.version,
        policy_digest=plan.policy.digest,
        prompts=plan.config.evaluate.prompts,
        heldout=done.advantages.metrics.get("reward"),
        rewards=rewards,
        guardrails={label: metrics_of(label, scores) for label, scores in done.guardrails.items()},
        samples=done.rollouts.rows,
        stored=plan.stored is not None,
        seconds={
            "total": seconds,
            "rollouts": done.rollouts.seconds,
            # They are computed concurrently.
            "rewards": max(scores.seconds for scores in done.rewards.values()),
            "advantages": done.advantages.seconds,
        },
        folder=plan.store.path(plan.rollouts.folder),
    )


def metrics_of(label: str, scores: ArtifactRef) -> RewardMetrics:
    """Read the statistics of a table of scores."""
    metrics = scores.metrics
    return RewardMetrics(
        mean=metrics.get(f"rewards/{label}/mean"),
        std=metrics.get(f"rewards/{label}/std"),
        without=int(metrics[f"rewards/{label}/null"]),
        failed=int(metrics[f"rewards/{label}/failed"]),
    )
