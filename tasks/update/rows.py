"""Stored rollouts joined with their advantages -> the rows that each algorithm trains a component on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl
import pyarrow as pa

from configs.training import ParitySection
from grpo_core.parity import BF16, FP16, ParityTolerance, of_rounding
from grpo_core.policies.engines.settings import EngineRecord
from grpo_core.policies.protocol import PolicyFamily
from grpo_core.rollouts.ragged import RaggedRows, RaggedTokens
from grpo_core.rollouts.streams import Stream
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.process_group import ProcessGroup
from grpo_core.update.step import RatioStepMetrics, StepMetrics, UpdateResult
from grpo_core.update.velocity_settings import VELOCITY_METHODS
from grpo_core.update.velocity_update import NftStepMetrics, SignedStepMetrics, update_by_velocity
from tasks.process import in_threads
from tasks.runs.sources import digests_in, read_sources, sources_of
from tasks.runs.stored_streams import STORED_STREAMS, sample_files
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.parquet import STREAM, read_advantages, scan_tables
from tasks.storage.schemas import NFT_STEPS, UPDATE_STEPS, VELOCITY_STEPS

_LEFT_ON_DISK = frozenset({"completion", "support_ids"})


@dataclass(frozen=True)
class StoredRows:
    """The rows of one update, and what was left out."""

    rows: RaggedRows  # samples with an advantage, within the staleness
    settings: Any  # how they were sampled, as the policy's frozen settings
    staleness: tuple[int, ...]  # versions between each row's policy and the one that is trained
    too_stale: int  # rows left out because of it
    engines: tuple[EngineRecord, ...] = ()  # those that sampled them; none where no engine is stored

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

    Text and images are not read. What is large stays on disk, and microbatches read their own: states of denoising
    steps, and the ids that a truncated sampler could choose, in `fetched`, which can be deleted after the update.
    Rows are at most `max_staleness` versions from this policy; 0: only rows of this one.

    Raises:
        InputError: the image of a prompt is missing or damaged.
        ValueError: the rollouts were sampled by other weights than the policy's and none may be stale, or no sample
            has a reward, or all rows are too stale, or states are missing.
    """
    stored, sampler = STORED_STREAMS[stream], policy.sampler
    scored, *folders = in_threads(
        partial(store.local_files, advantages, fetched / f"{stream}-advantages"),
        *(
            partial(store.local_files, reference, fetched / f"{stream}-rollouts-{number}", without=stored.unread)
            for number, reference in enumerate(rollouts)
        ),
    )
    scores = _read_scores(scored, stream)
    table = _read_samples(folders).join(scores, on="sample_id", how="inner", validate="1:1", maintain_order="left")
    if table.is_empty():
        raise ValueError(f"no sample has an advantage in its {stream}; compute advantages with rewards for this stream")
    if table["reward"].null_count() == table.height:
        empty = "every reward of every sample is null, so there is nothing to learn from; check the rewards' tables"
        raise ValueError(f"{empty}, and give the prompts what their rewards need (target images, for example)")
    staleness = (table["policy_version"] - policy.version).abs()
    on_policy = table["policy_digest"] == sampler.digest
    if max_staleness == 0 and not on_policy.all():
        samplers = sorted(digest[:12] for digest in table.filter(~on_policy)["policy_digest"].unique())
        wanted = f"version {policy.version} ({sampler.digest[:12]})"
        raise ValueError(f"the rollouts were sampled by policy {samplers}, not by {wanted}; collect rollouts with it")
    kept = table.filter((on_policy | (staleness <= max_staleness)) & pl.col("advantage").is_not_null())
    too_stale = table.filter(~on_policy & (staleness > max_staleness))
    if len(too_stale) == len(table):
        far = f"all {len(table)} rows are further than {max_staleness} versions from version {policy.version}"
        raise ValueError(f"{far}; allow more staleness, or take rollouts of nearer versions")
    first = table.row(0, named=True)
    images = read_sources(store, digests_in(kept), (reference.run for reference in rollouts))
    sampled = stored.read(kept, folders, fetched, first[stored.max_length], sources_of(kept, images))
    return StoredRows(
        rows=RaggedRows(
            **vars(sampled),
            sample_ids=tuple(kept["sample_id"]),
            advantages=kept["advantage"].cast(pl.Float32).to_torch(),
            on_policy=(kept["policy_digest"] == sampler.digest).to_torch(),
        ),
        settings=family.settings(first),
        staleness=tuple((kept["policy_version"] - policy.version).abs().to_list()),
        too_stale=len(too_stale),
        engines=_engines_of(kept),
    )


def _engines_of(table: pl.DataFrame) -> tuple[EngineRecord, ...]:
    names = [each.name for each in fields(EngineRecord)]
    if names[0] not in table.columns:
        return ()
    said = table.select(names).drop_nulls(names[0]).unique(maintain_order=True)
    return tuple(EngineRecord(*row) for row in said.iter_rows())


def _read_samples(folders: Sequence[Path]) -> pl.DataFrame:
    stored = scan_tables(sample_files(folders))
    return stored.select([name for name in stored.collect_schema() if name not in _LEFT_ON_DISK]).collect()


def _read_scores(folder: Path, stream: Stream) -> pl.DataFrame:
    stored = read_advantages(sorted(folder.glob("*.parquet")), ("sample_id", "reward", "advantage"))
    scores = pl.from_arrow(stored)
    assert isinstance(scores, pl.DataFrame)
    return scores.filter(pl.col(STREAM) == stream).drop(STREAM)


@dataclass(frozen=True)
class Training:
    """What an update of a component needs."""

    stream: Stream
    component: Any  # of the policy; an algorithm needs more of it than others
    optimizer: PolicyOptimizer
    rows: RaggedRows
    settings: Any  # the algorithm's own section of the configuration
    seed: int  # decides the order of the rows, and what else the algorithm draws
    in_fp32: bool  # whether the model computes in fp32; decides the defaults of a parity gate
    process_group: ProcessGroup
    on_progress: Callable[[int, int], None] | None  # called with passes done and the total
    engines: tuple[EngineRecord, ...] = ()  # that sampled the rows; none where no engine is stored


@dataclass(frozen=True)
class Algorithm:
    """One way to train on stored rows: its function, what it measures of an optimizer step, and the table of that."""

    update: Callable[[Training], UpdateResult]
    metrics: type[StepMetrics]
    steps_schema: pa.Schema


def _by_ratios(training: Training) -> UpdateResult:
    others = [each for each in training.engines if each.engine != "policy"]
    return update_policy(
        training.component,
        training.optimizer,
        training.rows,
        training.settings,
        seed=training.seed,
        parity=parity_tolerance(
            training.component, training.rows, training.settings.parity, in_fp32=training.in_fp32, engines=others
        ),
        sampled_by=", ".join(map(str, others)) or None,
        process_group=training.process_group,
        on_progress=training.on_progress,
    )


def parity_tolerance(
    component: Any, rows: RaggedRows, parity: ParitySection, *, in_fp32: bool, engines: Sequence[EngineRecord] = ()
) -> ParityTolerance:
    """Return how far log-probs of these rows may be from the stored ones.

    Args:
        in_fp32: whether the model computes in fp32.
        engines: that sampled the rows, other than the policy itself.
    """
    stream = rows.actions.stream
    all_in_fp32 = in_fp32 and all(each.engine_dtype == "float32" for each in engines)
    rounding = None
    if not all_in_fp32 and stream == "tokens":
        # The tolerance of tokens that are sampled or scored in 16 bits.
        dtypes = {each.engine_dtype for each in engines}
        unit = FP16 if in_fp32 and "bfloat16" not in dtypes else BF16
        assert isinstance(rows.actions, RaggedTokens), "steps of denoising have tolerances of their own"
        stored = rows.rollout_logprobs.values[rows.loss_mask.values]
        rounding = of_rounding(
            stored,
            blocks=component.blocks,
            vocabulary=component.vocabulary,
            temperature=rows.actions.temperature,
            unit=unit,
        )
    summed = component.summed_values(rows.actions)
    return parity.tolerance(
        stream, in_fp32=all_in_fp32, summed_values=summed, by_engine=bool(engines), rounding=rounding
    )


def _by_velocity(training: Training) -> UpdateResult:
    return update_by_velocity(
        training.component,
        training.optimizer,
        training.rows,
        training.settings,
        seed=training.seed,
        process_group=training.process_group,
        on_progress=training.on_progress,
    )


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "grpo": Algorithm(_by_ratios, RatioStepMetrics, UPDATE_STEPS),
        "nft": Algorithm(_by_velocity, NftStepMetrics, NFT_STEPS),
        **{
            name: Algorithm(_by_velocity, SignedStepMetrics, VELOCITY_STEPS)
            for name in VELOCITY_METHODS
            if name != "nft"
        },
    }
)
"""By the name in update.algorithm."""
