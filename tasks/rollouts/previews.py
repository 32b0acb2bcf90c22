"""Choose the seeds of a sampling round by the advantages of their previews."""

import math

import torch

from configs.rollouts import KeepSection
from grpo_core.advantages.previews import average_ranks, select_extremes
from tasks.rollouts.plan import GroupPlan, KeptSeed, RolloutPlan
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.parquet import read_advantages


def keep_seeds(
    store: ArtifactStore, plan: RolloutPlan, previews: RolloutPlan, advantages: ArtifactRef, keep: KeepSection
) -> RolloutPlan:
    """Return the plan with the seeds whose previews have the highest and lowest advantages, in the order of the seeds.

    Of equal previews the first seeds are the best ones. What has no advantage is kept only where others are too few.
    """
    columns = ("sample_id", "reward", "advantage")
    with store.reading() as read:
        table = read_advantages(sorted(read(advantages).glob("*.parquet")), columns).select(columns).to_pylist()
    rated = {row["sample_id"]: (row["reward"], row["advantage"]) for row in table}

    def kept(group: GroupPlan) -> tuple[KeptSeed, ...]:
        rewards, found = zip(*(rated[name] for name in previews.sample_ids(group)), strict=True)
        values = torch.tensor([math.nan if value is None else value for value in found], dtype=torch.float64)
        ranks = average_ranks(-values).tolist()
        return tuple(
            KeptSeed(sibling, rewards[sibling], None if math.isnan(ranks[sibling]) else ranks[sibling])
            for sibling in select_extremes(values, keep.best, keep.worst)
        )

    groups = tuple(group.model_copy(update={"kept": kept(group)}) for group in plan.groups)
    return plan.model_copy(update={"groups": groups})
