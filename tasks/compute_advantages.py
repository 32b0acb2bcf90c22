"""Stage 3: scores of siblings -> one reward and one advantage a sample."""

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from jaxtyping import Float
from torch import Tensor

from configs.schema import AdvantagesSection, RewardSection
from grpo_core.advantages import GroupAdvantages, compute_advantages
from grpo_core.rewards.combine import CombinedRewards, combine_rewards
from tasks.caching import stage_task
from tasks.progress import progress_of
from tasks.storage.reference import ArtifactRef
from tasks.storage.schemas import ADVANTAGES, SCHEMA_VERSION
from tasks.storage.store import current_store
from tasks.storage.tables import write_table

STAGE = "compute advantages"


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "rollouts": inputs["rollouts"].digest,
        "rewards": inputs["rewards"].digest,
        "mix": [[section.label, section.weight] for section in inputs["mix"]],
        "advantages": inputs["advantages"].model_dump(mode="json"),
    }


@stage_task(STAGE, _describe)
def compute_advantages_task(
    rollouts: ArtifactRef,
    rewards: ArtifactRef,
    mix: tuple[RewardSection, ...],
    advantages: AdvantagesSection,
    folder: str,
    title: str,
) -> ArtifactRef:
    """Combine the rewards of each sample and compare it with its siblings."""
    started = time.perf_counter()
    store = current_store()
    tell = progress_of(f"{title}: {STAGE}", rewards.rows)
    with tempfile.TemporaryDirectory() as fetched, store.staging() as staged:
        rollout_files = store.local_files(rollouts, Path(fetched) / "rollouts")
        reward_files = store.local_files(rewards, Path(fetched) / "rewards")
        samples = _read_samples(rollout_files, reward_files, [section.label for section in mix])
        combined = combine_rewards(samples.values, [section.weight for section in mix])
        result = compute_advantages(combined.rewards, normalize_std=advantages.scale == "group", eps=advantages.eps)
        digest = write_table(staged / "advantages.parquet", ADVANTAGES, _columns(samples, combined, result))
        tell(rewards.rows, rewards.rows)
        return store.commit(
            staged,
            f"{folder}/advantages",
            digest=digest,
            schema_version=SCHEMA_VERSION,
            rows=rewards.rows,
            seconds=time.perf_counter() - started,
            metrics=_metrics(combined, result),
        )


@dataclass(frozen=True)
class _Samples:
    """Scores laid out by group and sibling.

    Attributes:
        sample_ids: one list a group.
        group_ids: in the order of the rollouts.
        values: NaN where a reward is null.
    """

    sample_ids: tuple[tuple[str, ...], ...]
    group_ids: tuple[str, ...]
    values: Float[Tensor, "groups siblings rewards"]


def _read_samples(rollouts: Path, rewards: Path, labels: Sequence[str]) -> _Samples:
    table = pl.read_parquet(sorted(rollouts.glob("*.parquet")), columns=["sample_id", "group_id"])
    for label in labels:
        scores = pl.read_parquet(rewards / f"{label}.parquet", columns=["sample_id", "value"])
        table = table.join(
            scores.rename({"value": f"reward:{label}"}),
            on="sample_id",
            how="left",
            validate="1:1",
            maintain_order="left",
        )
    groups = table.group_by("group_id", maintain_order=True).agg(pl.all())
    sizes = {len(ids) for ids in groups["sample_id"]}
    assert len(sizes) == 1, f"groups of one size, got {sizes}"
    values = [torch.tensor(_with_nan(groups[f"reward:{label}"].to_list()), dtype=torch.float64) for label in labels]
    return _Samples(
        sample_ids=tuple(tuple(ids) for ids in groups["sample_id"].to_list()),
        group_ids=tuple(groups["group_id"].to_list()),
        values=torch.stack(values, -1),
    )


def _with_nan(values: list[list[float | None]]) -> list[list[float]]:
    return [[math.nan if value is None else value for value in row] for row in values]


def _columns(samples: _Samples, combined: CombinedRewards, result: GroupAdvantages) -> dict[str, list[Any]]:
    siblings = samples.values.shape[1]

    def each(values: Float[Tensor, " groups"]) -> list[float | None]:
        return _with_null(values.repeat_interleave(siblings))

    return {
        "sample_id": [sample_id for group in samples.sample_ids for sample_id in group],
        "group_id": [group_id for group_id in samples.group_ids for _ in range(siblings)],
        "reward": _with_null(combined.rewards.flatten()),
        "advantage": _with_null(result.advantages.flatten()),
        "group_mean": each(result.means),
        "group_std": each(result.stds),
        "imputed": combined.imputed.sum(-1).flatten().tolist(),
    }


def _with_null(values: Float[Tensor, " samples"]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _metrics(combined: CombinedRewards, result: GroupAdvantages) -> dict[str, float]:
    metrics = {
        "frac_reward_zero_std": float(result.constant.double().mean()),
        "samples_without_reward": float((~combined.present).sum()),
        "rewards_imputed": float(combined.imputed.sum()),
    }
    if combined.present.any():
        metrics["reward"] = float(combined.rewards[combined.present].double().mean())
        metrics["reward_std"] = float(result.stds.double().mean())
    return metrics
