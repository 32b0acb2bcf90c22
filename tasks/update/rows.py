"""Stored rollouts joined with their advantages -> the rows that an update learns from."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from grpo_core.policies.family import PolicyFamily
from grpo_core.records import TrainingRows
from tasks.rollouts.rows import padded, token_batch
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore


@dataclass(frozen=True)
class StoredRows:
    """The rows of one update, and what was left out.

    Attributes:
        rows: samples with an advantage, within the staleness.
        settings: how they were sampled, as the policy's frozen settings.
        staleness: versions between each row's policy and the one that is trained.
        too_stale: rows left out because of it.
    """

    rows: TrainingRows
    settings: Any
    staleness: tuple[int, ...]
    too_stale: int

    def metrics(self) -> dict[str, float]:
        """Return the number of rows of other weights and their staleness; empty if there are none."""
        others = int((~self.rows.on_policy).sum())
        if not others and not self.too_stale:
            return {}
        count = max(1, len(self.staleness))
        return {
            "rows_off_policy": float(others),
            "staleness/mean": sum(self.staleness) / count,
            "staleness/max": float(max(self.staleness, default=0)),
            "rows_left_out": float(self.too_stale),
        }


def read_training_rows(
    store: ArtifactStore,
    rollouts: Sequence[ArtifactRef],
    advantages: ArtifactRef,
    policy: PolicyRef,
    family: PolicyFamily,
    *,
    max_staleness: int,
) -> StoredRows:
    """Read the rows of an update; rows without an advantage and rows of versions too far away are left out.

    Text and images are not read. The tokens of all rows are in memory at once, about 13 bytes each.

    Args:
        store: where the artifacts are kept.
        rollouts: one artifact per sampling round.
        advantages: of all of them.
        policy: the version to train.
        family: the policy's family.
        max_staleness: maximum number of versions between a row's policy and this one; 0: only rows of this one.

    Raises:
        ValueError: the rollouts were sampled by other weights than the policy's and none may be stale, or no sample
            has a reward, or all rows are too stale.
    """
    with tempfile.TemporaryDirectory() as fetched:
        tables = [
            path
            for number, reference in enumerate(rollouts)
            for path in sorted(store.local_files(reference, Path(fetched) / str(number)).glob("*.parquet"))
        ]
        scored = store.local_files(advantages, Path(fetched) / "advantages")
        table = pl.concat([_read_rollouts(path) for path in tables])
        scores = pl.read_parquet(sorted(scored.glob("*.parquet")), columns=["sample_id", "reward", "advantage"])
    table = table.join(scores, on="sample_id", how="inner", validate="1:1", maintain_order="left")
    _require_rewards(table)
    staleness = (table["policy_version"] - policy.version).abs()
    on_policy = table["policy_digest"] == policy.digest
    if max_staleness == 0:
        _require_own_rows(table.filter(~on_policy), policy)
    kept = table.filter((on_policy | (staleness <= max_staleness)) & pl.col("advantage").is_not_null())
    too_stale = table.filter(~on_policy & (staleness > max_staleness))
    if len(too_stale) == len(table):
        raise ValueError(
            f"all {len(table)} rows are further than {max_staleness} versions from version {policy.version}; allow "
            "more staleness, or take rollouts of nearer versions"
        )
    first = table.row(0, named=True)
    return StoredRows(
        rows=_rows(kept, policy),
        settings=family.settings(first),
        staleness=tuple((kept["policy_version"] - policy.version).abs().to_list()),
        too_stale=len(too_stale),
    )


def _read_rollouts(path: Path) -> pl.DataFrame:
    names = pl.read_parquet_schema(path)
    return pl.read_parquet(path, columns=[name for name in names if name not in ("image", "completion")])


def _require_rewards(table: pl.DataFrame) -> None:
    if table["reward"].null_count() == table.height:
        raise ValueError(
            "every reward of every sample is null, so there is nothing to learn from; check the rewards' tables, "
            "and give the prompts what their rewards need (target images, for example)"
        )


def _require_own_rows(others: pl.DataFrame, policy: PolicyRef) -> None:
    if others.height:
        samplers = sorted(digest[:12] for digest in others["policy_digest"].unique())
        raise ValueError(
            f"the rollouts were sampled by policy {samplers}, not by version {policy.version} "
            f"({policy.digest[:12]}); collect rollouts with this version"
        )


def _rows(table: pl.DataFrame, policy: PolicyRef) -> TrainingRows:
    return TrainingRows(
        sample_ids=tuple(table["sample_id"]),
        tokens=token_batch(table),
        rollout_logprobs=padded(table["rollout_logprobs"]),
        advantages=table["advantage"].cast(pl.Float32).to_torch(),
        finished=table["finished"].to_torch(),
        on_policy=(table["policy_digest"] == policy.digest).to_torch(),
    )
