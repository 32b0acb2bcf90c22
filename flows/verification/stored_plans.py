"""The prompts and seeds of stored rows as a plan, and how it differs from what the prompt files plan."""

import json
from collections.abc import Iterator

from grpo_core.rollouts.streams import ImageSize
from tasks.rollouts.plan import GroupPlan, RolloutPlan
from tasks.runs.layout import PARTS
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.parquet import read_columns

_OF_GROUP = ("group_id", "prompt_id", "dataset", "prompt", "columns", "target_uri", "target_sha256", "sources")
_OF_SIZE = ("width", "height")


def read_groups(store: ArtifactStore, rollouts: str) -> Iterator[GroupPlan]:
    """Yield the groups of stored rollouts, in their order."""
    table = read_columns(store.filesystem, store.path(rollouts), PARTS, (*_OF_GROUP, *_OF_SIZE))
    seen: set[str] = set()
    for row in table.to_pylist():
        if row["group_id"] in seen:
            continue
        seen.add(row["group_id"])
        size = ImageSize(row["width"], row["height"]) if "width" in row else None
        given = {name: row.get(name) for name in _OF_GROUP}
        columns, sources = json.loads(given.pop("columns")), tuple(given.pop("sources") or ())
        yield GroupPlan(**given, columns=columns, sources=sources, size=size)


def plan_difference(stored: RolloutPlan, expected: RolloutPlan) -> str | None:
    """Say where the prompts of stored rows first differ from those that the prompt files plan; None if nowhere."""
    if len(stored.groups) != len(expected.groups):
        return f"it has {len(stored.groups)} prompts, and the prompt files plan {len(expected.groups)}"
    by_name = {group.group_id: group for group in expected.groups}
    for group in stored.groups:
        planned = by_name.get(group.group_id)
        if planned is None:
            return f"the prompt files plan no group {group.group_id}"
        for name in type(group).model_fields:
            was, now = getattr(group, name), getattr(planned, name)
            if was != now and name != "kept":
                shown = f"{name} of {group.group_id} is {str(was)[:80]!r}, and the prompt files plan {str(now)[:80]!r}"
                return f"{shown}: another file, seed or order of prompts"
    return None
