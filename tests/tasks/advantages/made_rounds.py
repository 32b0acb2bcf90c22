"""Sampling rounds of samples without content, with any groups of drafts and renderings, and scores of them."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from grpo_core.streams import Stream
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.parquet import write_table
from tasks.storage.tables.schemas import REWARDS, SCHEMA_VERSION, TEXT_ROLLOUTS, rollout_schema

UNEVEN = (5, *[1] * 11)
"""Twelve drafts, the first of them rendered five times."""


def places_of(renderings: Sequence[int]) -> list[tuple[int, int]]:
    """Return draft and rendering of each sample of a group."""
    return [(draft, index) for draft, count in enumerate(renderings) for index in range(count)]


def sample_ids(renderings: Sequence[int], groups: int = 1) -> list[str]:
    """Return the names of all samples, group after group."""
    return [f"g{group}.s{draft:02d}.r{index:02d}" for group in range(groups) for draft, index in places_of(renderings)]


def made_round(
    store: ArtifactStore,
    scores: Mapping[str, Sequence[float | None]],
    renderings: Sequence[int],
    streams: Sequence[Stream] = ("tokens", "denoising"),
    *,
    datasets: Sequence[str] = ("default",),
    folder: str = "iteration_000001",
) -> SamplingRound:
    """Write rollouts with a group for each dataset, and the scores of each reward."""
    names, places = sample_ids(renderings, len(datasets)), places_of(renderings) * len(datasets)
    columns = {
        "sample_id": names,
        "group_id": [name.partition(".")[0] for name in names],
        "prompt_id": [f"prompt{name.partition('.')[0]}" for name in names],
        "dataset": [dataset for dataset in datasets for _ in range(len(names) // len(datasets))],
        "columns": ["{}"] * len(names),
        "token_sample": [draft for draft, _ in places],
        "image_number": [index for _, index in places],
    }
    rollouts = commit_rows(store, f"{folder}/rollouts", rollout_schema("image", streams), columns)
    return SamplingRound(rollouts, {label: made_scores(store, label, names, each) for label, each in scores.items()})


def made_texts(store: ArtifactStore, scores: Mapping[str, Sequence[float | None]], groups: int) -> SamplingRound:
    """Write texts, which have no drafts."""
    count = len(next(iter(scores.values()))) // groups
    names = [f"g{group}.s{index:02d}" for group in range(groups) for index in range(count)]
    columns = {
        "sample_id": names,
        "group_id": [name.partition(".")[0] for name in names],
        "dataset": ["default"] * len(names),
        "columns": ["{}"] * len(names),
    }
    rollouts = commit_rows(store, "iteration_000001/rollouts", TEXT_ROLLOUTS, columns)
    return SamplingRound(rollouts, {label: made_scores(store, label, names, each) for label, each in scores.items()})


def made_scores(store: ArtifactStore, label: str, names: Sequence[str], values: Sequence[float | None]) -> ArtifactRef:
    """Write the scores of one reward."""
    columns = {"sample_id": names, "reward": [label] * len(names), "value": values}
    return commit_rows(store, f"iteration_000001/rewards/{label}", REWARDS, columns, "scores.parquet")


def commit_rows(
    store: ArtifactStore,
    folder: str,
    schema: pa.Schema,
    columns: Mapping[str, Sequence[object]],
    name: str = "part-00000.parquet",
) -> ArtifactRef:
    """Write an artifact of one table; what is not among the columns is null."""
    rows = len(next(iter(columns.values())))
    with store.staging() as staged:
        filled = {each: columns.get(each, [None] * rows) for each in schema.names}
        digest = write_table(staged / name, schema, filled)
        return store.commit(
            staged, folder, digest=digest, schema_version=SCHEMA_VERSION, rows=rows, seconds=0.0, metrics={}
        )
