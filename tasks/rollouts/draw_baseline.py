"""Images that no policy made: what the rewards give for a blank image, and for the target itself."""

import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from configs.sections import PlacementSection
from grpo_core.rewards.images import encode_png
from tasks.execution.caching import stage_task
from tasks.prompts.targets import TargetReference, load_target
from tasks.rollouts.plan import GroupPlan, RolloutPlan
from tasks.runs.layout import IMAGES_FILE, PART_FILE, ROLLOUTS, Baseline, baseline_folder
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import current_store
from tasks.storage.tables import schemas
from tasks.storage.tables.parquet import joint_digest, write_table

STAGE = "draw baseline"


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = [group.model_dump(mode="json") for group in _drawn(inputs["plan"])]
    return {"baseline": inputs["baseline"], "groups": groups}


@stage_task(STAGE, _describe)
def draw_baseline_task(baseline: Baseline, plan: RolloutPlan, placement: PlacementSection) -> ArtifactRef:
    """Keep one image for every prompt of the plan that has a target, in the target's own size.

    The table has the columns of rollouts that rewards read, so that it is scored like them.
    """
    started, store, groups = time.perf_counter(), current_store(), _drawn(plan)
    columns = {
        "sample_id": [f"{group.group_id}.{baseline}" for group in groups],
        **{name: [getattr(group, name) for group in groups] for name in ("group_id", "prompt_id", "dataset", "prompt")},
        "iteration": [plan.iteration] * len(groups),
        "columns": [json.dumps(group.columns, ensure_ascii=False, sort_keys=True) for group in groups],
        "target_uri": [group.target_uri for group in groups],
        "target_sha256": [group.target_sha256 for group in groups],
        "token_ids": [[] for _ in groups],
        "defect": [None] * len(groups),
        "image": [_drawing(baseline, group) for group in groups],
    }
    with store.staging() as staged:
        tables = ((PART_FILE, schemas.BASELINES), (IMAGES_FILE, schemas.IMAGES))
        digests = [write_table(staged / name.format(0), schema, columns) for name, schema in tables]
        return store.commit(
            staged,
            f"{baseline_folder(baseline)}/{ROLLOUTS}",
            digest=joint_digest(digests),
            schema_version=schemas.SCHEMA_VERSION,
            rows=len(groups),
            seconds=time.perf_counter() - started,
            metrics={},
        )


def _drawn(plan: RolloutPlan) -> list[GroupPlan]:
    return [group for group in plan.groups if group.target_uri is not None]


def _drawing(baseline: Baseline, group: GroupPlan) -> Mapping[str, object]:
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
