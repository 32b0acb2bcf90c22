"""Stored scores: find those that are there already.

A reward's scope (`datasets`, `where`) says which samples it scores; the provenance says what their scores come from. A
sample out of scope has neither a score nor a provenance, so a wider scope only adds samples and a narrower one none.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import polars as pl

from configs.scoring import RewardSection
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import provenance_of
from tasks.execution.stages import SHARDS
from tasks.runs.layout import PARTS, SCORES_FILE
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.parquet import read_columns


def provenance_json(section: RewardSection) -> str:
    """Describe where the scores of a section come from, as stored with each score.

    Scores of the same sample with the same text are the same.

    Raises:
        InputError: a weight file is missing or not the right one.
    """
    return json.dumps(provenance_of(build_reward(section.reward, section.settings)), sort_keys=True)


def scores_key(section: RewardSection) -> tuple[str, str]:
    """Return the provenance and the scope of a section's scores: tables of the same rollouts with both are the same."""
    return provenance_json(section), json.dumps([section.datasets, section.where], sort_keys=True)


def in_scope(section: RewardSection, samples: pl.DataFrame) -> pl.DataFrame:
    """Return the samples that a section scores; they have the columns dataset and columns."""
    prompts = samples.select("dataset", "columns").unique()
    scored = [section.scores_prompt(dataset, json.loads(columns)) for dataset, columns in prompts.iter_rows()]
    return samples.join(prompts.filter(pl.Series(scored, dtype=pl.Boolean)), on=["dataset", "columns"], how="semi")


def samples_to_score(section: RewardSection, samples: pl.DataFrame, scored: Collection[str]) -> frozenset[str]:
    """Return the samples in scope that have no score yet, with their siblings if a score depends on them."""
    meant = in_scope(section, samples)
    missing = meant.filter(~pl.col("sample_id").is_in(list(scored)))
    if build_reward(section.reward, section.settings).needs_group:
        missing = meant.filter(pl.col("group_id").is_in(missing["group_id"].to_list()))
    return frozenset(missing["sample_id"])


def failed_scores(reference: ArtifactRef) -> int:
    """Count the samples of the table that could not be scored."""
    label = reference.folder.rsplit("/", 1)[-1]
    return int(reference.metrics.get(f"rewards/{label}/failed", 0.0))


@dataclass(frozen=True)
class NeededScores:
    """The scores that a reward needs over one sampling round.

    Attributes:
        stored: the table with exactly these scores; None if there is none.
        earlier: without such a table, the tables with some of them.
        missing: number of samples to score; 0 if their scores only have to be gathered in a table.
    """

    section: RewardSection
    stored: ArtifactRef | None
    earlier: tuple[ArtifactRef, ...]
    missing: int


class StoredScores:
    """The tables of scores of one sampling round, from any run; each is read once."""

    def __init__(self, store: ArtifactStore, rollouts: ArtifactRef, candidates: Sequence[ArtifactRef]) -> None:
        def read(reference: ArtifactRef, files: str, *columns: str) -> pl.DataFrame:
            return pl.DataFrame(read_columns(store.filesystem, f"{store.root}/{reference.uri}/{files}", columns))

        self._samples = read(rollouts, PARTS, "sample_id", "group_id", "dataset", "columns")
        self._tables = [
            (each, read(each, SCORES_FILE, "sample_id", "failure", "provenance").drop_nulls("provenance"))
            for each in candidates
        ]

    def needed(self, section: RewardSection) -> NeededScores:
        """Find the table of a section's scores, or what has to be scored without one."""
        wanted = provenance_json(section)
        meant = frozenset(in_scope(section, self._samples)["sample_id"])
        earlier: list[ArtifactRef] = []
        scored: set[str] = set()
        for reference, table in self._tables:
            own = table.filter(pl.col("provenance") == wanted)
            valid = own.filter(pl.col("failure").is_null())["sample_id"]
            if meant == set(valid) and len(table) == len(valid):
                return NeededScores(section, reference, (), 0)
            if len(own):
                earlier.append(reference)
                scored.update(valid)
        missing = samples_to_score(section, self._samples, scored)
        return NeededScores(section, None, tuple(earlier), len(missing))


def joined_folder(folder: str) -> str:
    """Return the folder of the complete table for the folder of a shard."""
    place, found, rest = folder.partition(f"/{SHARDS}/")
    return f"{place}/{rest.partition('/')[2]}" if found else folder
