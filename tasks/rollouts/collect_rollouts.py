"""Stage 1: a policy and a plan -> images or texts, their tokens, and the log-probs they were sampled with."""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from configs.sections import PlacementSection, RolloutSection
from grpo_core.collect import collect_rollouts, sampled_at_once
from grpo_core.policies.protocol import family_module
from grpo_core.streams import Stream
from tasks.execution.caching import stage_task
from tasks.execution.memory import halve_on_out_of_memory, peak_memory, reset_peak_memory
from tasks.execution.resources import resource
from tasks.execution.stages import Arguments, Part, Sharding, shard_folder, unsharded
from tasks.models.resident import ModelSpec, ResidentPolicy
from tasks.progress import progress_of
from tasks.rollouts.denoising import state_rows
from tasks.rollouts.plan import RolloutPlan
from tasks.rollouts.rows import rollout_columns
from tasks.rollouts.tokens import token_metrics
from tasks.runs.layout import IMAGES, IMAGES_FILE, PART_FILE, PARTS, ROLLOUTS, STATES, STATES_FILE
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import current_store
from tasks.storage.tables import schemas
from tasks.storage.tables.parquet import TableWriter, joint_digest, part_digests

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
    with tempfile.TemporaryDirectory() as fetched, store.staging() as staged:
        for number, part in enumerate(parts):
            folder = store.local_files(part, Path(fetched) / str(number))
            for name in (PART_FILE, IMAGES_FILE, STATES_FILE):
                if (path := folder / name.format(0)).exists():
                    _link_or_copy(path, staged / name.format(number))
        return store.commit(
            staged,
            f"{plan.folder}/{ROLLOUTS}",
            digest=_digest(staged),
            schema_version=schemas.SCHEMA_VERSION,
            rows=sum(part.rows for part in parts),
            # Shards are sampled in parallel.
            seconds=max(part.seconds for part in parts) + time.perf_counter() - started,
            metrics=token_metrics(sorted(staged.glob(PARTS))),
            peak_memory=max((part.peak_memory for part in parts if part.peak_memory is not None), default=None),
        )


def _digest(folder: Path) -> str:
    """Return the digest of the rows, their images and their states, the same however many files they are in."""
    files = [path for pattern in (PARTS, IMAGES, STATES) for path in sorted(folder.glob(pattern))]
    return joint_digest([digest for path in files for digest in part_digests(path)])


def _link_or_copy(path: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(path, target)
    except OSError:
        # Another file system, or one without hard links.
        shutil.copyfile(path, target)


def _recorded(plan: RolloutPlan, model: ModelSpec) -> tuple[Stream, ...]:
    """Return the streams whose actions are kept: tokens always, and denoising steps where some are noisy."""
    noisy = plan.window_start is not None
    return tuple(stream for stream in model.family.streams if stream == "tokens" or noisy)


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
        modality, noisy = model.family.modality, plan.window_start is not None
        with store.staging() as staged:

            def writer(name: str, schema: pa.Schema) -> TableWriter:
                return TableWriter(staged / name.format(0), schema)

            table = writer(PART_FILE, schemas.rollout_schema(modality, _recorded(plan, model)))
            images = writer(IMAGES_FILE, schemas.IMAGES) if modality == "image" else None
            states = writer(STATES_FILE, schemas.STATES) if noisy else None
            for done, (group, planned) in enumerate(zip(groups, plan.groups, strict=True), start=1):
                columns = rollout_columns(group, planned, plan, policy, rollout)
                table.write(columns)
                if images is not None:
                    images.write(columns)
                if states is not None:
                    for row in state_rows(group):
                        states.write(row)
                report_progress(done * plan.group_size)
            for each in (table, images, states):
                if each is not None:
                    each.close()
            return store.commit(
                staged,
                f"{plan.folder}/{ROLLOUTS}",
                digest=_digest(staged),
                schema_version=schemas.SCHEMA_VERSION,
                rows=table.rows,
                seconds=time.perf_counter() - started,
                metrics=token_metrics(sorted(staged.glob(PARTS))),
                peak_memory=peak_memory(),
            )

    return halve_on_out_of_memory(title, store.run, "rollout.prompts_per_batch", rollout.prompts_per_batch, sample)
