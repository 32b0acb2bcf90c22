"""Read the scores of an iteration's samples, and arrange them by what is compared for a stream."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from configs.scoring import RewardSection
from grpo_core.advantages.compared import compared_samples
from grpo_core.advantages.compute import kl_penalty
from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.rollouts.streams import Stream
from tasks.process import map_in_threads
from tasks.runs.layout import IMAGES, REWARD_COLUMN, STATES, SamplingRound
from tasks.runs.samples import join_samples, tables_of
from tasks.storage.artifacts.store import ArtifactStore, Read
from tasks.storage.lists import padded
from tasks.storage.parquet import scan_tables

_READ = ("sample_id", "iteration", "group_id", "prompt_id", "dataset", "columns")
_DRAFT, _RANK, _COUNT = "token_sample", "preview_rank", "preview_count"


@dataclass(frozen=True)
class Samples:
    """Scores laid out by group and sample: of a prompt, or of what is compared with each other for one stream."""

    table: pl.DataFrame  # one row per sample, group after group
    values: Float[Tensor, "groups samples rewards"]  # NaN where a reward is null
    # Number of the draft that each sample is rendered from; without renderings each is its own.
    drafts: Int[Tensor, "groups samples"]
    applies: Bool[Tensor, "groups rewards"]  # whether a reward scores the group's dataset
    # KL to the reference in nats, one per sample; None without a KL in the reward.
    penalties: Float[Tensor, "groups samples"] | None
    # Rank of each sample's preview among those of its prompt; None where no previews have chosen the samples.
    preview_ranks: Float[Tensor, "groups samples"] | None = None
    preview_count: int = 0  # previews of a prompt

    @property
    def datasets(self) -> tuple[str, ...]:
        """Dataset of each group."""
        return tuple(self.table["dataset"].gather_every(self.values.shape[1]))


def read_compared_samples(
    store: ArtifactStore, rounds: Sequence[SamplingRound], mix: Sequence[RewardSection], settings: AdvantageSettings
) -> Samples:
    """Join the rollouts of all sampling rounds with the scores of every reward of the mix."""
    with store.reading(without=(IMAGES, STATES)) as read:
        # At once: those of a bucket take long one after another.
        map_in_threads(read, [part for each in rounds for part in each.stages])
        samples = pl.concat(_read_round(read, each, mix, settings) for each in rounds)
    # Siblings one after another, as their groups were drawn.
    samples = samples.sort(pl.int_range(pl.len()).min().over("group_id"), maintain_order=True)
    sizes = samples.group_by("group_id").len()["len"].unique().to_list()
    assert len(sizes) == 1, f"groups of one size, got {sizes}"
    size = sizes[0]
    prompts = samples.select("dataset", "columns").gather_every(size).rows()
    others = [(name, json.loads(columns)) for name, columns in prompts]
    routed = [[section.scores_prompt(name, columns) for section in mix] for name, columns in others]
    values = [_by_group(samples[REWARD_COLUMN + section.label], size) for section in mix]
    return Samples(
        table=samples,
        values=torch.stack(values, -1),
        drafts=samples[_DRAFT].cast(pl.Int64).to_torch().view(-1, size),
        applies=torch.tensor(routed),
        penalties=_by_group(samples["kl_penalty"], size) if settings.kl_coef > 0 else None,
        preview_ranks=_by_group(samples[_RANK], size) if _RANK in samples else None,
        preview_count=samples[_COUNT][0] if _COUNT in samples else 0,
    )


def samples_of(stream: Stream, samples: Samples, rewards: Sequence[int]) -> Samples:
    """Arrange samples by what is compared for a stream, with its rewards by index; a draft's first has its tokens."""
    chosen = list(rewards)
    compared = compared_samples(stream, samples.values[..., chosen], samples.drafts)
    trained = compared.samples.flatten()
    return Samples(
        table=samples.table[trained.tolist()],
        values=compared.values,
        drafts=samples.drafts.flatten()[compared.samples],
        applies=samples.applies[compared.groups][:, chosen],
        penalties=_chosen(samples.penalties, compared.samples),
        preview_ranks=_chosen(samples.preview_ranks, compared.samples),
        preview_count=samples.preview_count,
    )


def _chosen(values: Tensor | None, samples: Int[Tensor, "rows compared"]) -> Float[Tensor, "rows compared"] | None:
    return None if values is None else values.flatten()[samples]


def _by_group(values: pl.Series, size: int) -> Float[Tensor, "groups samples"]:
    """Return one row a group, in fp64, NaN where a value is null."""
    return values.cast(pl.Float64).fill_null(math.nan).to_torch().view(-1, size)


def _read_round(
    read: Read, part: SamplingRound, mix: Sequence[RewardSection], settings: AdvantageSettings
) -> pl.DataFrame:
    scored = [(section.label, part.rewards[section.label]) for section in mix]
    table = join_samples(read, [part.rollouts], scored, (), (*_READ, _DRAFT, _RANK, _COUNT))
    if _DRAFT not in table.columns:
        # Of texts each sample is its own.
        table = table.with_columns(pl.int_range(pl.len(), dtype=pl.Int32).over("group_id").alias(_DRAFT))
    if settings.kl_coef > 0:
        table = table.with_columns(pl.Series("kl_penalty", _penalties(tables_of(read(part.rollouts)), settings)))
    return table


def _penalties(files: Sequence[Path], settings: AdvantageSettings) -> list[float]:
    stored = scan_tables(files).select("scored_logprobs", "ref_logprobs", "loss_mask").collect()
    if stored["ref_logprobs"].null_count():
        missing = "advantages.kl_coef needs the reference's log-probs, and these rollouts have none"
        raise ValueError(f"{missing}; collect them with this configuration, or set advantages.kl_coef to 0")
    penalties = kl_penalty(
        padded(stored["scored_logprobs"]),
        padded(stored["ref_logprobs"]),
        padded(stored["loss_mask"]),
        estimator=settings.kl_estimator,
    )
    return [float(value) for value in penalties]
