"""Stage 1: a policy and a plan -> images or texts with their log-probs, as stored columns; images for baselines."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from configs.placement import PlacementSection
from configs.rollouts import RolloutSection
from grpo_core.collect import collect_rollouts, sampled_at_once
from grpo_core.policies.engines.settings import Progress
from grpo_core.policies.protocol import family_module
from grpo_core.rollouts.images import encode_png
from grpo_core.rollouts.records import RolloutGroup
from tasks.execution.caching import stage_task
from tasks.execution.resources import halve_on_out_of_memory, peak_memory, reset_peak_memory
from tasks.execution.stage import Arguments, Part, Sharding, shard_folder
from tasks.metrics import offload_metrics
from tasks.models.resident import ModelSpec
from tasks.progress import progress_of
from tasks.prompts.targets import TargetReference, load_target
from tasks.rollouts.columns import rollout_columns
from tasks.rollouts.engines import engine_modules, opened_sampler, uses_resident_policy
from tasks.rollouts.plan import GroupPlan, RolloutPlan
from tasks.runs import layout
from tasks.runs.sources import read_sources
from tasks.runs.stored_streams import StatesWriter, state_digests, token_metrics
from tasks.storage import schemas
from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import current_store
from tasks.storage.files import link_or_copy
from tasks.storage.parquet import TableWriter, joint_digest, part_digests, write_table

STAGE = "collect rollouts"


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    model, policy = inputs["model"], inputs["policy"]
    settings = model.section.result_settings()
    return {
        "policy": policy.digest,
        "version": policy.version,
        # The digest covers the adapters' matrices, not their scale, which is added here. New adapters add nothing,
        # whatever they are, but a model with any rounds otherwise.
        "lora": settings["lora"] if policy.version else settings["lora"] is not None,
        "model": model.digest,
        "dtype": model.section.dtype,
        "autocast": model.section.autocast,
        "plan": inputs["plan"].model_dump(mode="json"),
        "rollout": inputs["rollout"].result_settings(),
        "with_reference": inputs["with_reference"],
        "reference": policy.copies.get("reference") if inputs["with_reference"] else None,
        "attn_implementation": settings["attn_implementation"],
        "quantization": settings["quantization"],
    }


def _modules(arguments: Arguments) -> tuple[str, ...]:
    return (family_module(arguments["model"].section.kind), *engine_modules(arguments["rollout"]))


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
        changed = {"plan": part, "placement": arguments["placement"].uncut()}
        parts.append(Part(f"{part.title}: {STAGE}", {**arguments, **changed}))
    return parts


def _join(arguments: Arguments, parts: Sequence[ArtifactRef]) -> ArtifactRef:
    """Join the shards' files under one manifest, without reading their content."""
    started = time.perf_counter()
    store, plan = current_store(), arguments["plan"]
    with store.reading() as read, store.staging() as staged:
        for number, part in enumerate(parts):
            folder = read(part)
            for name in (layout.PART_FILE, layout.IMAGES_FILE):
                if (path := folder / name.format(0)).exists():
                    link_or_copy(path, staged / name.format(number))
            for piece, path in enumerate(sorted(folder.glob(layout.STATES))):
                link_or_copy(path, staged / layout.STATES_FILE.format(number, piece))
        return commit_artifact(
            store,
            staged,
            f"{plan.folder}/{layout.ROLLOUTS}",
            digest=_digest(staged),
            rows=sum(part.rows for part in parts),
            # Shards are sampled in parallel.
            seconds=max(part.seconds for part in parts) + time.perf_counter() - started,
            metrics=token_metrics(sorted(staged.glob(layout.PARTS))),
            peak_memory=max((part.peak_memory for part in parts if part.peak_memory is not None), default=None),
        )


def _digest(folder: Path) -> str:
    """Return the digest of the rows, their images and their states, the same however many files they are in."""
    files = [path for pattern in (layout.PARTS, layout.IMAGES) for path in sorted(folder.glob(pattern))]
    digests = [digest for path in files for digest in part_digests(path)]
    digests += [digest for path in sorted(folder.glob(layout.STATES)) for digest in state_digests(path)]
    return joint_digest(digests)


@stage_task(
    STAGE,
    _describe,
    kind="rollouts",
    sharding=Sharding(_cut, _join),
    modules=_modules,
    uses_policy=uses_resident_policy,
)
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
        sources = read_sources(store, plan.named_sources)
        requests = [plan.request(group, sources) for group in plan.groups]
        modality, noisy = model.family.modality, plan.window_start is not None
        opened = opened_sampler(
            policy, model, rollout, placement, with_reference=with_reference, on_progress=report_progress
        )
        with store.staging() as staged, opened as sampler:
            at_once = len(requests) if sampler.at_once else prompts_per_batch
            groups = collect_rollouts(
                sampler.policy, requests, prompts_per_batch=at_once, with_reference=with_reference
            )
            # Only policies of texts have templates.
            start = getattr(sampler.policy, "answer_start", "")
            sampled_by = {**asdict(sampler.record), "completion_start": start}
            recorded = [stream for stream in model.family.streams if stream == "tokens" or noisy]
            chosen = any(group.kept for group in plan.groups)
            schema = schemas.rollout_schema(
                modality,
                recorded,
                with_start=bool(start),
                with_previews=chosen,
                with_solver=getattr(rollout, "solver", "euler") != "euler",
            )
            columns_of = partial(rollout_columns, plan=plan, policy=policy, settings=rollout, sampled_by=sampled_by)
            rows = _write_groups(
                groups, plan, schema, staged, columns_of, report_progress, with_images=modality == "image"
            )
            moved = sampler.policy.offload.take_moved()
            return commit_artifact(
                store,
                staged,
                f"{plan.folder}/{layout.ROLLOUTS}",
                digest=_digest(staged),
                rows=rows,
                seconds=time.perf_counter() - started,
                metrics=token_metrics(sorted(staged.glob(layout.PARTS))) | offload_metrics("rollouts", moved),
                peak_memory=peak_memory(),
            )

    return halve_on_out_of_memory(title, store.run, "rollout.prompts_per_batch", rollout.prompts_per_batch, sample)


def _write_groups(
    groups: Iterable[RolloutGroup],
    plan: RolloutPlan,
    schema: pa.Schema,
    folder: Path,
    columns_of: Callable[[RolloutGroup, GroupPlan], Mapping[str, Sequence[Any]]],
    report_progress: Progress,
    *,
    with_images: bool,
) -> int:
    """Write rows, images and states of the groups of a plan as they are sampled; return the number of rows."""
    table = TableWriter(folder / layout.PART_FILE.format(0), schema)
    images = TableWriter(folder / layout.IMAGES_FILE.format(0), schemas.IMAGES) if with_images else None
    states = None if plan.window_start is None else StatesWriter(folder)
    for done, (group, planned) in enumerate(zip(groups, plan.groups, strict=True), start=1):
        columns = columns_of(group, planned)
        table.write(columns)
        if images is not None:
            images.write(columns)
        if states is not None:
            states.write(group)
        report_progress(done * plan.group_size)
    for each in (table, images, states):
        if each is not None:
            each.close()
    return table.rows


BASELINE_STAGE = "draw baseline"


def _describe_baseline(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = [group.model_dump(mode="json") for group in _drawn(inputs["plan"])]
    return {"baseline": inputs["baseline"], "groups": groups}


@stage_task(BASELINE_STAGE, _describe_baseline)
def draw_baseline_task(baseline: layout.Baseline, plan: RolloutPlan, placement: PlacementSection) -> ArtifactRef:
    """Keep one image for every prompt of the plan that has a target, in the target's own size.

    The table has the columns of rollouts that rewards read, so that it is scored like them.
    """
    started, store, groups = time.perf_counter(), current_store(), _drawn(plan)
    columns = {
        "sample_id": [f"{group.group_id}.{baseline}" for group in groups],
        **{name: [getattr(group, name) for group in groups] for name in ("group_id", "prompt_id", "dataset", "prompt")},
        "iteration": [plan.iteration] * len(groups),
        "columns": [json.dumps(group.columns, ensure_ascii=False, sort_keys=True) for group in groups],
        "sources": [group.sources for group in groups],
        "target_uri": [group.target_uri for group in groups],
        "target_sha256": [group.target_sha256 for group in groups],
        "token_ids": [[] for _ in groups],
        "defect": [None] * len(groups),
        "image": [_drawing(baseline, group) for group in groups],
    }
    with store.staging() as staged:
        tables = ((layout.PART_FILE, schemas.BASELINES), (layout.IMAGES_FILE, schemas.IMAGES))
        digests = [write_table(staged / name.format(0), schema, columns) for name, schema in tables]
        return commit_artifact(
            store,
            staged,
            f"{layout.baseline_folder(baseline)}/{layout.ROLLOUTS}",
            digest=joint_digest(digests),
            rows=len(groups),
            seconds=time.perf_counter() - started,
            metrics={},
        )


def _drawn(plan: RolloutPlan) -> list[GroupPlan]:
    return [group for group in plan.groups if group.target_uri is not None]


def _drawing(baseline: layout.Baseline, group: GroupPlan) -> Mapping[str, object]:
    assert group.target_uri is not None, "drawn for prompts with a target"
    assert group.target_sha256 is not None, "a target has been read"
    target = load_target(TargetReference(group.target_uri, group.target_sha256))
    image = target if baseline == "target" else Image.new("RGB", target.size, background(target))
    return {"bytes": encode_png(image), "path": f"{group.group_id}.{baseline}.png"}


def background(image: Image.Image) -> tuple[int, int, int]:
    """Return the commonest colour along the border of an RGB image; of equally common ones the darkest."""
    pixels = np.asarray(image)
    border = np.concatenate([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]])
    colours, counts = np.unique(border, axis=0, return_counts=True)
    red, green, blue = colours[counts.argmax()].tolist()
    return red, green, blue
