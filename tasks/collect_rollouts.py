"""Stage 1: a policy and a plan -> pictures, their tokens, and the log-probs they were sampled with."""

import io
import json
import time
from collections.abc import Mapping
from typing import Any

from PIL import Image

from configs.schema import PlacementSection, RolloutSection
from grpo_core.collect import RolloutGroup, collect_rollouts
from grpo_core.policies.glm_image.policy import GlmImageSettings
from tasks.caching import stage_task
from tasks.models import ModelSpec, policy_at
from tasks.plan import GroupPlan, RolloutPlan
from tasks.progress import progress_of
from tasks.storage.reference import ArtifactRef, PolicyRef
from tasks.storage.schemas import ROLLOUTS, SCHEMA_VERSION
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
        "plan": inputs["plan"].model_dump(mode="json"),
        "rollout": inputs["rollout"].model_dump(mode="json"),
    }


def drawing_settings(rollout: RolloutSection) -> GlmImageSettings:
    """The part of the section that says how a picture is drawn."""
    return GlmImageSettings(
        height=rollout.height,
        width=rollout.width,
        temperature=rollout.temperature,
        num_inference_steps=rollout.num_inference_steps,
        guidance_scale=rollout.guidance_scale,
        decode_batch_size=rollout.decode_batch_size,
    )


@stage_task(STAGE, _describe)
def collect_rollouts_task(
    policy: PolicyRef, plan: RolloutPlan, model: ModelSpec, rollout: RolloutSection, placement: PlacementSection
) -> ArtifactRef:
    """Draw every group of the plan and keep every rollout."""
    started = time.perf_counter()
    store = current_store()
    tell = progress_of(f"{plan.title}: {STAGE}", len(plan.groups) * plan.group_size)
    drawer = policy_at(policy, model, drawing_settings(rollout), placement)
    requests = [plan.request(group) for group in plan.groups]
    tokens = 0
    with store.staging() as staged:
        writer = TableWriter(staged / "part-00000.parquet", ROLLOUTS)
        groups = collect_rollouts(drawer, requests, prompts_per_batch=rollout.prompts_per_batch)
        for done, (group, planned) in enumerate(zip(groups, plan.groups, strict=True), start=1):
            writer.write(_columns(group, planned, policy, rollout))
            tokens += int(group.tokens.loss_mask.sum())
            tell(done * plan.group_size, len(requests) * plan.group_size)
        digest = writer.close()
        return store.commit(
            staged,
            f"{plan.folder}/rollouts",
            digest=digest,
            schema_version=SCHEMA_VERSION,
            rows=writer.rows,
            seconds=time.perf_counter() - started,
            metrics={"num_tokens": float(tokens), "completions/mean_length": tokens / writer.rows},
        )


def _columns(
    group: RolloutGroup, planned: GroupPlan, policy: PolicyRef, rollout: RolloutSection
) -> dict[str, list[Any]]:
    """One group's rows."""
    request, tokens = group.request, group.tokens
    rows = len(request.sample_ids)
    same = {
        "group_id": planned.group_id,
        "prompt_id": planned.prompt_id,
        "prompt": planned.prompt,
        "columns": json.dumps(planned.columns, ensure_ascii=False, sort_keys=True),
        "target_uri": planned.target_uri,
        "target_sha256": planned.target_sha256,
        "temperature": tokens.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "height": rollout.height,
        "width": rollout.width,
        "num_inference_steps": rollout.num_inference_steps,
        "guidance_scale": rollout.guidance_scale,
        "policy_version": policy.version,
        "policy_digest": policy.digest,
    }
    return {
        **{name: [value] * rows for name, value in same.items()},
        "sample_id": list(request.sample_ids),
        "sibling": list(range(rows)),
        "token_ids": tokens.token_ids.tolist(),
        "rollout_logprobs": group.rollout_logprobs.tolist(),
        "loss_mask": tokens.loss_mask.tolist(),
        "length": tokens.loss_mask.sum(-1).tolist(),
        "seed": list(request.seeds),
        "noise_seed": list(request.noise_seeds),
        "image": [
            {"bytes": _png(image), "path": f"{sample_id}.png"}
            for image, sample_id in zip(group.images, request.sample_ids, strict=True)
        ],
    }


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    # At 1024 x 1024 the default level takes five times as long for a file that is a sixth smaller.
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
