"""Stage 1: a policy and a plan -> images or texts, their tokens, and the log-probs they were sampled with."""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.sections import PlacementSection, RolloutSection
from grpo_core.collect import collect_rollouts, sampled_at_once
from grpo_core.policies.protocol import family_module
from tasks.execution.caching import stage_task
from tasks.execution.out_of_memory import halve_on_out_of_memory
from tasks.execution.peak_memory import peak_memory, reset_peak_memory
from tasks.execution.resources import resource
from tasks.execution.stages import Arguments, Part, Sharding, shard_folder, unsharded
from tasks.metrics.names import COMPLETION_LENGTH, TOKENS
from tasks.models.resident import ModelSpec, ResidentPolicy
from tasks.progress import progress_of
from tasks.rollouts.plan import RolloutPlan
from tasks.rollouts.rows import SCHEMAS, rollout_columns
from tasks.runs.layout import ROLLOUTS
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import current_store
from tasks.storage.tables.parquet import TableWriter, joint_digest, part_digests
from tasks.storage.tables.schemas import SCHEMA_VERSION

STAGE = "collect rollouts"


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    model, policy = inputs["model"], inputs["policy"]
    settings = model.section.result_settings()
    return {
        "policy": policy.digest,
        "version": policy.version,
        # The digest covers the adapters' matrices, not their scale, which is added here.
        "lora": settings["lora"] if policy.version else None,
        "model": model.digest,
        "dtype": model.section.dtype,
        "autocast": model.section.autocast,
        "plan": inputs["plan"].model_dump(mode="json"),
        "rollout": inputs["rollout"].result_settings(),
        "with_reference": inputs["with_reference"],
        "reference": policy.reference_digest if inputs["with_reference"] else None,
        **{name: settings[name] for name in ("attn_implementation",) if name in settings},
    }


def _modules(arguments: Arguments) -> tuple[str, ...]:
    return (family_module(arguments["model"].section.kind),)


def _cut(arguments: Arguments, shards: int) -> list[Part]:
    """Split between complete batches: the other rows of its batch determine a row's last bits."""
    plan: RolloutPlan = arguments["plan"]
    batches = list(sampled_at_once(plan.groups, arguments["rollout"].prompts_per_batch))
    count = min(shards, len(batches))
    parts = []
    for index in range(count):
        mine = batches[index * len(batches) // count : (index + 1) * len(batches) // count]
        change = {
            "folder": shard_folder(plan.folder, index, count),
            "title": f"{plan.title}, shard {index + 1} of {count}",
            "groups": tuple(group for batch in mine for group in batch),
        }
        part = plan.model_copy(update=change)
        parts.append(Part(f"{part.title}: {STAGE}", {**arguments, "plan": part, "placement": unsharded(arguments)}))
    return parts


def _join(arguments: Arguments, parts: Sequence[ArtifactRef]) -> ArtifactRef:
    """Join the shards' files under one manifest, without reading their content."""
    started = time.perf_counter()
    store, plan = current_store(), arguments["plan"]
    digests: list[str] = []
    with tempfile.TemporaryDirectory() as fetched, store.staging() as staged:
        for number, part in enumerate(parts):
            for path in sorted(store.local_files(part, Path(fetched) / str(number)).glob("*.parquet")):
                digests += part_digests(path)
                _link_or_copy(path, staged / f"part-{number:05d}.parquet")
        return store.commit(
            staged,
            f"{plan.folder}/{ROLLOUTS}",
            digest=joint_digest(digests),
            schema_version=SCHEMA_VERSION,
            rows=sum(part.rows for part in parts),
            # Shards are sampled in parallel.
            seconds=max(part.seconds for part in parts) + time.perf_counter() - started,
            metrics=_joint_metrics(parts),
            peak_memory=max((part.peak_memory for part in parts if part.peak_memory is not None), default=None),
        )


def _link_or_copy(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:
        # Another file system, or one without hard links.
        shutil.copyfile(path, target)


def _joint_metrics(parts: Sequence[ArtifactRef]) -> dict[str, float]:
    rows = sum(part.rows for part in parts)
    clipped = sum(round(part.metrics["completions/clipped_ratio"] * part.rows) for part in parts)
    completions = sum(round(part.metrics[COMPLETION_LENGTH] * part.rows) for part in parts)
    return {
        TOKENS: sum(part.metrics[TOKENS] for part in parts),
        COMPLETION_LENGTH: completions / rows,
        "completions/min_length": min(part.metrics["completions/min_length"] for part in parts),
        "completions/max_length": max(part.metrics["completions/max_length"] for part in parts),
        "completions/clipped_ratio": clipped / rows,
    }


@stage_task(STAGE, _describe, kind="rollouts", sharding=Sharding(_cut, _join), modules=_modules)
def collect_rollouts_task(
    policy: PolicyRef,
    plan: RolloutPlan,
    model: ModelSpec,
    rollout: RolloutSection,
    with_reference: bool,
    placement: PlacementSection,
) -> ArtifactRef:
    """Sample every group of the plan and keep every rollout."""
    title, store = f"{plan.title}: {STAGE}", current_store()

    def sample(prompts_per_batch: int) -> ArtifactRef:
        started = time.perf_counter()
        reset_peak_memory()
        report_progress = progress_of(title, len(plan.groups) * plan.group_size)
        sampler = resource(ResidentPolicy).at(policy, model, rollout, placement)
        requests = [plan.request(group) for group in plan.groups]
        groups = collect_rollouts(sampler, requests, prompts_per_batch=prompts_per_batch, with_reference=with_reference)
        lengths: list[int] = []
        prompt_tokens = cut = 0
        with store.staging() as staged:
            writer = TableWriter(staged / "part-00000.parquet", SCHEMAS[model.family.modality])
            for done, (group, planned) in enumerate(zip(groups, plan.groups, strict=True), start=1):
                writer.write(rollout_columns(group, planned, plan.iteration, policy, rollout))
                lengths += group.tokens.loss_mask.sum(-1).tolist()
                prompt_tokens += group.prompt_length * plan.group_size
                cut += int((~group.finished).sum())
                report_progress(done * plan.group_size)
            digest = writer.close()
            return store.commit(
                staged,
                f"{plan.folder}/{ROLLOUTS}",
                digest=digest,
                schema_version=SCHEMA_VERSION,
                rows=writer.rows,
                seconds=time.perf_counter() - started,
                metrics=_metrics(lengths, prompt_tokens, cut),
                peak_memory=peak_memory(),
            )

    return halve_on_out_of_memory(title, store.run, "rollout.prompts_per_batch", rollout.prompts_per_batch, sample)


def _metrics(lengths: Sequence[int], prompt_tokens: int, cut: int) -> dict[str, float]:
    return {
        TOKENS: float(prompt_tokens + sum(lengths)),
        COMPLETION_LENGTH: sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": cut / len(lengths),
    }
