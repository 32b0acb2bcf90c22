"""Groups of rollouts -> the values of the columns that are stored; each stream of actions adds its own.

The names and types of the columns are the schema in tasks/storage/schemas.py.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from PIL import Image

from grpo_core.rollouts.images import encode_png
from grpo_core.rollouts.records import BrokenImage, RolloutGroup
from tasks.rollouts.plan import GroupPlan, RolloutPlan
from tasks.runs.stored_streams import STORED_STREAMS
from tasks.storage.artifacts.reference import PolicyRef


def rollout_columns(
    group: RolloutGroup,
    planned: GroupPlan,
    plan: RolloutPlan,
    policy: PolicyRef,
    settings: Any,
    sampled_by: Mapping[str, str | None],
) -> dict[str, Sequence[Any]]:
    """Return a group's rows by column, with the sampling `settings` and `sampled_by`; a schema keeps its own."""
    request = group.request
    rows = len(request.sample_ids)
    same = {
        "iteration": plan.iteration,
        "group_id": planned.group_id,
        "prompt_id": planned.prompt_id,
        "dataset": planned.dataset,
        "prompt": planned.prompt,
        "columns": json.dumps(planned.columns, ensure_ascii=False, sort_keys=True),
        "sources": planned.sources,
        "target_uri": planned.target_uri,
        "target_sha256": planned.target_sha256,
        "policy_version": policy.version,
        "policy_digest": policy.digest,
        # Settings that only some models of a modality have.
        **dict.fromkeys(("min_pixels", "max_pixels")),
        **{name: _plain(value) for name, value in asdict(settings).items()},
        **({} if request.size is None else request.size._asdict()),
        **sampled_by,
    }
    columns: dict[str, Sequence[Any]] = {
        **{name: [value] * rows for name, value in same.items()},
        "sample_id": request.sample_ids,
        "sibling": plan.siblings(planned),
        "token_sample": [place.token_sample for place in plan.places],
        "image_number": [place.image_number for place in plan.places],
        "seed": request.seeds,
        "noise_seed": request.noise_seeds,
        **_output_columns(group),
    }
    if planned.kept:
        columns |= {
            "preview_reward": [each.reward for each in planned.kept],
            "preview_rank": [each.rank for each in planned.kept],
            "preview_count": [settings.previews.per_prompt] * rows,
            "preview_steps": [settings.previews.steps] * rows,
        }
    for stream in group.streams:
        columns |= STORED_STREAMS[stream].columns(group)
    return columns


def _plain(value: object) -> object:
    """Return a tuple of texts as JSON, and one of numbers as a list."""
    if not isinstance(value, tuple):
        return value
    return list(value) if value and not isinstance(value[0], str) else json.dumps(value, ensure_ascii=False)


def _output_columns(group: RolloutGroup) -> dict[str, Sequence[Any]]:
    names = group.request.sample_ids
    texts = [output for output in group.outputs if isinstance(output, str)]
    if texts:
        return {"completion": texts}
    broken = [output if isinstance(output, BrokenImage) else None for output in group.outputs]
    images = [output.image if isinstance(output, BrokenImage) else output for output in group.outputs]
    encoded = [
        {"bytes": encode_png(image), "path": f"{name}.png"}
        for image, name in zip(images, names, strict=True)
        if isinstance(image, Image.Image)
    ]
    return {"image": encoded, "defect": [each and each.reason for each in broken]}
