"""Stage 1: a policy and a plan -> pictures or texts, their tokens, and the log-probs they were sampled with."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from configs.placement_sections import PlacementSection
from configs.schema import RolloutSection
from grpo_core.collect import collect_rollouts
from tasks.caching import stage_task
from tasks.models import ModelSpec, policy_at
from tasks.plan import RolloutPlan
from tasks.progress import progress_of
from tasks.rollout_rows import SCHEMAS, rollout_columns
from tasks.storage.reference import ArtifactRef, PolicyRef
from tasks.storage.schemas import SCHEMA_VERSION
from tasks.storage.store import current_store
from tasks.storage.tables import TableWriter

STAGE = "collect rollouts"


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    model, policy = inputs["model"], inputs["policy"]
    return {
        "policy": policy.digest,
        "version": policy.version,
        # The digest is of the adapters' matrices; how far they count is said beside them, once there are any.
        "lora": model.section.model_dump(mode="json")["lora"] if policy.version else None,
        "model": model.digest,
        "dtype": model.section.dtype,
        "autocast": model.section.autocast,
        "plan": inputs["plan"].model_dump(mode="json"),
        "rollout": inputs["rollout"].model_dump(mode="json"),
        "with_reference": inputs["with_reference"],
        "reference": policy.reference_digest if inputs["with_reference"] else None,
    }


@stage_task(STAGE, _describe)
def collect_rollouts_task(
    policy: PolicyRef,
    plan: RolloutPlan,
    model: ModelSpec,
    rollout: RolloutSection,
    with_reference: bool,
    placement: PlacementSection,
) -> ArtifactRef:
    """Sample every group of the plan and keep every rollout."""
    started = time.perf_counter()
    store = current_store()
    tell = progress_of(f"{plan.title}: {STAGE}", len(plan.groups) * plan.group_size)
    settings = model.family.settings(rollout.model_dump())
    sampler = policy_at(policy, model, settings, placement)
    requests = [plan.request(group) for group in plan.groups]
    lengths: list[int] = []
    cut = 0
    with store.staging() as staged:
        writer = TableWriter(staged / "part-00000.parquet", SCHEMAS[model.family.medium])
        groups = collect_rollouts(
            sampler, requests, prompts_per_batch=rollout.prompts_per_batch, with_reference=with_reference
        )
        for done, (group, planned) in enumerate(zip(groups, plan.groups, strict=True), start=1):
            writer.write(rollout_columns(group, planned, policy, settings, sampler.max_length))
            lengths += group.tokens.loss_mask.sum(-1).tolist()
            cut += int((~group.finished).sum())
            tell(done * plan.group_size, len(requests) * plan.group_size)
        digest = writer.close()
        return store.commit(
            staged,
            f"{plan.folder}/rollouts",
            digest=digest,
            schema_version=SCHEMA_VERSION,
            rows=writer.rows,
            seconds=time.perf_counter() - started,
            metrics=_metrics(lengths, cut),
        )


def _metrics(lengths: Sequence[int], cut: int) -> dict[str, float]:
    return {
        "num_tokens": float(sum(lengths)),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": cut / len(lengths),
    }
