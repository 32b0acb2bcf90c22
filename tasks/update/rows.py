"""Stored rollouts joined with their advantages -> the rows that an update learns from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from grpo_core.policies.protocol import PolicyFamily
from grpo_core.records import TrainingRows
from grpo_core.streams import Stream
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
    fetched: Path,
    *,
    stream: Stream,
    max_staleness: int,
) -> StoredRows:
    """Read the rows of an update; rows without an advantage and rows of versions too far away are left out.

    Text and images are not read. The tokens of all rows are in memory at once, about 13 bytes each. The ids that a
    truncated sampler could choose, up to thousands for each token, stay on disk, and microbatches read their own.

    Args:
        fetched: folder for local files that the rows are read from; it can be deleted after the update.
        max_staleness: maximum number of versions between a row's policy and this one; 0: only rows of this one.

    Raises:
        ValueError: the rollouts were sampled by other weights than the policy's and none may be stale, or no sample
            has a reward, or all rows are too stale.
    """
    files = [
        path
        for number, reference in enumerate(rollouts)
        for path in sorted(store.local_files(reference, fetched / f"rollouts-{number}").glob("*.parquet"))
    ]
    scored = store.local_files(advantages, fetched / "advantages")
    scores = pl.read_parquet(sorted(scored.glob("*.parquet")), columns=["sample_id", "reward", "advantage"])
    left_on_disk = ("image", "completion", "support_ids")
    names = [[name for name in pl.read_parquet_schema(path) if name not in left_on_disk] for path in files]
    table = pl.concat([pl.read_parquet(path, columns=columns) for path, columns in zip(files, names, strict=True)])
    table = table.join(scores, on="sample_id", how="inner", validate="1:1", maintain_order="left")
    if table["reward"].null_count() == table.height:
        raise ValueError(
            "every reward of every sample is null, so there is nothing to learn from; check the rewards' tables, "
            "and give the prompts what their rewards need (target images, for example)"
        )
    staleness = (table["policy_version"] - policy.version).abs()
    on_policy = table["policy_digest"] == policy.digest
    if max_staleness == 0 and not on_policy.all():
        samplers = sorted(digest[:12] for digest in table.filter(~on_policy)["policy_digest"].unique())
        raise ValueError(
            f"the rollouts were sampled by policy {samplers}, not by version {policy.version} "
            f"({policy.digest[:12]}); collect rollouts with this version"
        )
    kept = table.filter((on_policy | (staleness <= max_staleness)) & pl.col("advantage").is_not_null())
    too_stale = table.filter(~on_policy & (staleness > max_staleness))
    if len(too_stale) == len(table):
        raise ValueError(
            f"all {len(table)} rows are further than {max_staleness} versions from version {policy.version}; allow "
            "more staleness, or take rollouts of nearer versions"
        )
    first = table.row(0, named=True)
    return StoredRows(
        rows=TrainingRows(
            sample_ids=tuple(kept["sample_id"]),
            actions=token_batch(kept, _mapped_support_ids(files, kept["sample_id"], fetched)),
            rollout_logprobs=padded(kept["rollout_logprobs"]),
            advantages=kept["advantage"].cast(pl.Float32).to_torch(),
            finished=kept["finished"].to_torch(),
            on_policy=(kept["policy_digest"] == policy.digest).to_torch(),
            max_length=first["max_length"],
        ),
        settings=family.settings(first),
        staleness=tuple((kept["policy_version"] - policy.version).abs().to_list()),
        too_stale=len(too_stale),
    )


def _mapped_support_ids(files: Sequence[Path], kept: pl.Series, folder: Path) -> Tensor:
    """Write the support ids of the kept rows to one file, in their order, and map it into memory."""
    path = folder / "support_ids"
    with path.open("wb") as output:
        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=16, columns=["sample_id", "support_ids"]):
                rows = batch.filter(pc.is_in(batch["sample_id"], kept.to_arrow()))
                output.write(rows["support_ids"].flatten().to_numpy(zero_copy_only=False).tobytes())
    entries = path.stat().st_size // torch.int32.itemsize
    return torch.from_file(str(path), size=entries, dtype=torch.int32) if entries else torch.zeros(0, dtype=torch.int32)
