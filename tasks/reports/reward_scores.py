"""A run's stored scores in long form, and some of its samples scored a second time."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from configs.scoring import RewardSection
from grpo_core.rewards.registry import build_reward
from tasks.rewards.rows import batches_of, score_rows
from tasks.runs.layout import SCORES_FILE
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.store import ArtifactStore

_OF_SCORES = ("sample_id", "value", "raw", "failure", "seconds")


def read_scores(store: ArtifactStore, rounds: Mapping[int, Sequence[SamplingRound]]) -> pl.DataFrame:
    """Read one row per sample and reward, as :func:`tasks.reports.reward_analysis.analyse` needs them.

    Args:
        store: the run.
        rounds: rollouts with the scores to analyse, by iteration.

    Raises:
        StaleReferenceError: a table is missing or changed.
    """
    frames = []
    with tempfile.TemporaryDirectory() as fetched:
        for iteration, each in rounds.items():
            for part in each:
                samples = _samples(store, part, Path(fetched))
                for label, reference in part.rewards.items():
                    folder = store.local_files(reference, Path(fetched) / reference.folder)
                    scores = pl.read_parquet(folder / SCORES_FILE, columns=list(_OF_SCORES))
                    frame = samples.join(scores, on="sample_id", validate="1:1", maintain_order="left")
                    frames.append(frame.with_columns(label=pl.lit(label), iteration=pl.lit(iteration)))
    return pl.concat(frames).with_columns(run=pl.lit(store.run))


def _samples(store: ArtifactStore, part: SamplingRound, fetched: Path) -> pl.DataFrame:
    folder = store.local_files(part.rollouts, fetched / part.rollouts.folder)
    return pl.read_parquet(sorted(folder.glob("*.parquet")), columns=["sample_id", "group_id", "dataset"])


def score_again(
    store: ArtifactStore, iteration: int, part: SamplingRound, sections: Sequence[RewardSection], samples: int
) -> pl.DataFrame:
    """Score the first samples of a sampling round again by each reward, in the form of :func:`read_scores`.

    Args:
        store: the run.
        iteration: number of the iteration that the round belongs to.
        part: the sampling round.
        sections: the rewards.
        samples: complete groups are scored until there are at least this many samples.
    """
    frames = []
    with tempfile.TemporaryDirectory() as fetched:
        table = _samples(store, part, Path(fetched))
        groups = (
            table.group_by("group_id", maintain_order=True).len().with_columns(pl.col("len").cum_sum().alias("sum"))
        )
        chosen = groups.filter(pl.col("sum") - pl.col("len") < samples)["group_id"].to_list()
        wanted = table.filter(pl.col("group_id").is_in(chosen))
        source = store.local_files(part.rollouts, Path(fetched) / part.rollouts.folder)
        for section in sections:
            reward = build_reward(section.reward, section.settings)
            names = frozenset(wanted["sample_id"])
            batches = batches_of(source, section.batch_size, names, with_tokens=reward.needs_tokens)
            rows = [row for batch in batches for row in score_rows(reward, section, batch)]
            scores = pl.DataFrame(
                {
                    "sample_id": [row.sample_id for row in rows],
                    "value": [row.score.value for row in rows],
                    "raw": [row.score.raw for row in rows],
                    "failure": [row.score.failure for row in rows],
                    "seconds": [row.seconds for row in rows],
                },
                schema_overrides={"value": pl.Float64, "raw": pl.Float64, "failure": pl.String},
            )
            frame = wanted.join(scores, on="sample_id", validate="1:1", maintain_order="left")
            frames.append(frame.with_columns(label=pl.lit(section.label), iteration=pl.lit(iteration)))
    return pl.concat(frames).with_columns(run=pl.lit(store.run))
