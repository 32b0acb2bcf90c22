"""Read the scores of an iteration's samples, and arrange them by what is compared for a stream."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from configs.scoring import RewardSection
from grpo_core.advantages import AdvantageSettings, compared_samples, kl_penalty
from grpo_core.streams import Stream
from tasks.runs import layout
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.lists import padded

_READ = ("sample_id", "iteration", "group_id", "prompt_id", "dataset", "columns")
_DRAFT = "draft"


@dataclass(frozen=True)
class Samples:
    """Scores laid out by group and sample.

    Attributes:
        table: one row per sample, groups in the order of the rollouts.
        values: NaN where a reward is null.
        drafts: number of the draft that each sample is rendered from; without renderings each is its own.
        applies: whether a reward scores the group's dataset.
        penalties: KL to the reference in nats, one per sample; None without a KL in the reward.
    """

    table: pl.DataFrame
    values: Float[Tensor, "groups samples rewards"]
    drafts: Int[Tensor, "groups samples"]
    applies: Bool[Tensor, "groups rewards"]
    penalties: Float[Tensor, "groups samples"] | None


@dataclass(frozen=True)
class StreamSamples:
    """What is compared for one stream, one row per comparison.

    Attributes:
        mix: the rewards that count for the stream.
        table: one row per trained sample, those of a comparison one after another.
        values: rewards of what is compared, of the mix alone.
        applies: whether a reward of the mix scores the dataset of the comparison.
        penalties: of Samples.
        datasets: dataset of each comparison.
    """

    mix: tuple[RewardSection, ...]
    table: pl.DataFrame
    values: Float[Tensor, "rows compared rewards"]
    applies: Bool[Tensor, "rows rewards"]
    penalties: Float[Tensor, "rows compared"] | None
    datasets: tuple[str, ...]


def read_samples(
    store: ArtifactStore, rounds: Sequence[SamplingRound], mix: Sequence[RewardSection], settings: AdvantageSettings
) -> Samples:
    """Join the rollouts of all sampling rounds with the scores of every reward of the mix."""
    with tempfile.TemporaryDirectory() as fetched:
        parts = []
        for number, each in enumerate(rounds):
            place = Path(fetched) / str(number)
            rollouts = store.local_files(each.rollouts, place / "rollouts", without=(layout.IMAGES, layout.STATES))
            scored = {
                label: store.local_files(reference, place / f"rewards-{index}")
                for index, (label, reference) in enumerate(each.rewards.items())
            }
            parts.append(_read_round(rollouts, scored, mix, settings))
    samples = pl.concat(parts)
    # Siblings one after another, as their groups were drawn.
    samples = samples.sort(pl.int_range(pl.len()).min().over("group_id"), maintain_order=True)
    sizes = samples.group_by("group_id").len()["len"].unique().to_list()
    assert len(sizes) == 1, f"groups of one size, got {sizes}"
    size = sizes[0]
    prompts = samples.select("dataset", "columns").gather_every(size).rows()
    others = [(name, json.loads(columns)) for name, columns in prompts]
    routed = [[section.scores_prompt(name, columns) for section in mix] for name, columns in others]
    values = [_by_group(samples[_column(section)], size) for section in mix]
    return Samples(
        table=samples,
        values=torch.stack(values, -1),
        drafts=samples[_DRAFT].cast(pl.Int64).to_torch().view(-1, size),
        applies=torch.tensor(routed),
        penalties=_by_group(samples["kl_penalty"], size) if settings.kl_coef > 0 else None,
    )


def samples_of(stream: Stream, samples: Samples, mix: Sequence[RewardSection]) -> StreamSamples:
    """Arrange samples by what is compared for a stream, with the rewards that count for it."""
    chosen = [index for index, section in enumerate(mix) if section.counts_for(stream)]
    compared = compared_samples(stream, samples.values[..., chosen], samples.drafts)
    trained = compared.samples.flatten().tolist()
    table = samples.table[trained]
    penalties = None if samples.penalties is None else samples.penalties.flatten()[compared.samples]
    return StreamSamples(
        mix=tuple(mix[index] for index in chosen),
        table=table,
        values=compared.values,
        applies=samples.applies[compared.groups][:, chosen],
        penalties=penalties,
        datasets=tuple(table["dataset"].gather_every(compared.samples.shape[1])),
    )


def _by_group(values: pl.Series, size: int) -> Float[Tensor, "groups samples"]:
    """Return one row a group, in fp64, NaN where a value is null."""
    return values.cast(pl.Float64).fill_null(math.nan).to_torch().view(-1, size)


def _column(section: RewardSection) -> str:
    return f"reward:{section.label}"


def _read_round(
    rollouts: Path, rewards: Mapping[str, Path], mix: Sequence[RewardSection], settings: AdvantageSettings
) -> pl.DataFrame:
    files = sorted(rollouts.glob(layout.PARTS))
    scanned = pl.scan_parquet(files)
    if _DRAFT not in scanned.collect_schema().names():
        # Of texts each sample is its own.
        scanned = scanned.with_columns(pl.int_range(pl.len(), dtype=pl.Int32).over("group_id").alias(_DRAFT))
    table = scanned.select(*_READ, _DRAFT).collect()
    for section in mix:
        scores = pl.read_parquet(rewards[section.label] / layout.SCORES_FILE, columns=["sample_id", "value"])
        table = table.join(
            scores.rename({"value": _column(section)}),
            on="sample_id",
            how="left",
            validate="1:1",
            maintain_order="left",
        )
    if settings.kl_coef > 0:
        table = table.with_columns(pl.Series("kl_penalty", _penalties(files, settings)))
    return table


def _penalties(files: Sequence[Path], settings: AdvantageSettings) -> list[float]:
    stored = pl.read_parquet(list(files), columns=["scored_logprobs", "ref_logprobs", "loss_mask"])
    if stored["ref_logprobs"].null_count():
        raise ValueError(
            "advantages.kl_coef needs the reference's log-probs, and these rollouts have none; collect "
            "them with this configuration, or set advantages.kl_coef to 0"
        )
    penalties = kl_penalty(
        padded(stored["scored_logprobs"]),
        padded(stored["ref_logprobs"]),
        padded(stored["loss_mask"]),
        estimator=settings.kl_estimator,
    )
    return [float(value) for value in penalties]
