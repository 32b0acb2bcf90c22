"""The scores of sampling rounds in one frame: as stored, or of samples that are scored a second time."""

from collections.abc import Mapping, Sequence

import polars as pl

from configs.scoring import RewardSection
from grpo_core.rewards.registry import build_reward
from tasks.rewards.score_rows import batches_for, score_rows
from tasks.runs.layout import SCORES_FILE, STATES, SamplingRound
from tasks.runs.samples import read_rollouts
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.parquet import scan_tables

_NUMBERS = ("value", "raw", "seconds")
_OF_SAMPLES = ("sample_id", "group_id", "dataset")


def read_scores(store: ArtifactStore, rounds: Mapping[int, Sequence[SamplingRound]]) -> pl.DataFrame:
    """Read one row per sample and reward, with its numbers and its failure, from the sampling rounds by iteration."""
    frames = []
    with store.reading(without=(STATES,)) as read:
        for iteration, parts in rounds.items():
            for part in parts:
                samples = read_rollouts([read(part.rollouts)], _OF_SAMPLES)
                for label, reference in part.rewards.items():
                    stored = scan_tables([read(reference) / SCORES_FILE])
                    scores = stored.select("sample_id", *_NUMBERS, "failure").collect()
                    frames.append(_joined(samples, scores, label, iteration))
    return pl.concat(frames).with_columns(run=pl.lit(store.run))


def score_again(
    store: ArtifactStore,
    iteration: int,
    part: SamplingRound,
    sections: Sequence[RewardSection],
    samples: int,
    folders: Sequence[str] = (),
) -> pl.DataFrame:
    """Score complete groups of a round again by each reward, up to so many samples, as :func:`read_scores`."""
    frames = []
    with store.reading(without=(STATES,)) as read:
        source = read(part.rollouts)
        table = read_rollouts([source], _OF_SAMPLES)
        groups = table.group_by("group_id", maintain_order=True).len().with_columns(sum=pl.col("len").cum_sum())
        chosen = groups.filter(pl.col("sum") - pl.col("len") < samples)["group_id"].to_list()
        wanted = table.filter(pl.col("group_id").is_in(chosen))
        for section in sections:
            reward = build_reward(section.reward, section.settings)
            names = frozenset(wanted["sample_id"])
            batches = batches_for(reward, section, source, names, store, part.rollouts.run, folders)
            rows = [row for batch in batches for row in score_rows(reward, section, batch)]
            kinds = {"sample_id": pl.String, **dict.fromkeys(_NUMBERS, pl.Float64), "failure": pl.String}
            frames.append(_joined(wanted, pl.DataFrame(rows, kinds), section.label, iteration))
    return pl.concat(frames).with_columns(run=pl.lit(store.run))


def _joined(samples: pl.DataFrame, scores: pl.DataFrame, label: str, iteration: int) -> pl.DataFrame:
    frame = samples.join(scores, on="sample_id", validate="1:1", maintain_order="left")
    return frame.with_columns(label=pl.lit(label), iteration=pl.lit(iteration))
