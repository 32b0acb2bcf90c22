"""The samples of sampling rounds: rollouts, each reward's values and the advantages, joined by sample_id."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from grpo_core.rollouts.streams import STREAMS
from tasks.runs.layout import ADVANTAGE_COLUMN, EXTRA_COLUMN, EXTRA_FILE, IMAGES, REWARD_COLUMN, SCORES_FILE
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import Read
from tasks.storage.parquet import STREAM, read_advantages, scan_tables

IMAGE = "image"
_IMAGE_TYPE = pl.Struct({"bytes": pl.Binary, "path": pl.String})

ONE_EACH: Mapping[str, Any] = {"on": "sample_id", "how": "left", "validate": "1:1", "maintain_order": "left"}
"""How a table of samples is joined with another that has at most one row for each of them."""


def join_samples(
    read: Read,
    rollouts: Iterable[ArtifactRef],
    rewards: Iterable[tuple[str, ArtifactRef]],
    advantages: Iterable[ArtifactRef],
    columns: Sequence[str],
    where: pl.Expr | None = None,
    *,
    extra: bool = False,
) -> pl.DataFrame:
    """Read a row per sample of sampling rounds, in the stored order, with their scores and advantages.

    Scores are tables by label, one per round; advantages may lack samples. Columns that the modality does not have are
    left out. `extra` joins what reward functions reported about samples (`log_extra`).

    Returns:
        The columns; with advantages `reward`, `advantage` and `dropped` by the sample's first stream, `streams`, those
        that it has a row for, and `advantages/<stream>` of each; with scores `rewards/<label>`, the value of each
        reward before its weight. null stands for what does not apply or was not computed.
    """
    samples = read_rollouts([read(part) for part in rollouts], columns, where)
    samples = with_advantages(samples, [path for part in advantages for path in tables_of(read(part))])
    scores: dict[str, list[Path]] = {}
    for label, part in rewards:
        scores.setdefault(label, []).append(read(part) / SCORES_FILE)
    samples = with_scores(samples, scores)
    return with_extra(samples, scores) if extra else samples


def read_rollouts(folders: Iterable[Path], columns: Sequence[str], where: pl.Expr | None = None) -> pl.DataFrame:
    """Read those of these columns that the rollouts have, in the stored order; `where` chooses rows."""
    return pl.concat((_chosen(folder, columns, where) for folder in folders), how="diagonal")


def _chosen(folder: Path, columns: Sequence[str], where: pl.Expr | None) -> pl.DataFrame:
    table = scan_table(folder, images=IMAGE in columns)
    known = set(table.collect_schema().names())
    chosen = table if where is None else table.filter(where)
    return chosen.select([name for name in columns if name in known]).collect()


def scan_table(folder: Path, *, images: bool = False) -> pl.LazyFrame:
    """Scan the table of an artifact; rollouts with the column `image` if wanted, null where `grpo prune` deleted it."""
    table = scan_tables(tables_of(folder))
    if not images or "defect" not in table.collect_schema().names():
        return table
    files = sorted(folder.glob(IMAGES))
    if not files:
        return table.with_columns(pl.lit(None, _IMAGE_TYPE).alias(IMAGE))
    return table.join(scan_tables(files).select("sample_id", IMAGE), **ONE_EACH)


def with_scores(samples: pl.DataFrame, scores: Mapping[str, Sequence[Path]]) -> pl.DataFrame:
    """Join the values of each reward from its tables, by label, as `rewards/<label>`."""
    for label, files in scores.items():
        values = scan_tables(files).select("sample_id", "value").collect()
        samples = samples.join(values.rename({"value": REWARD_COLUMN + label}), **ONE_EACH)
    return samples


def with_extra(samples: pl.DataFrame, scores: Mapping[str, Sequence[Path]]) -> pl.DataFrame:
    """Join what a function reported about a sample beside each of these tables, as `extra/<label>/<column>`."""
    for label, files in scores.items():
        extras = [scan_tables([each]).collect() for file in files if (each := file.parent / EXTRA_FILE).is_file()]
        if extras:
            extra = pl.concat(extras, how="diagonal_relaxed")
            names = {name: name.replace(EXTRA_COLUMN, f"{EXTRA_COLUMN}{label}/", 1) for name in extra.columns}
            samples = samples.join(extra.rename(names), **ONE_EACH)
    return samples


def with_advantages(samples: pl.DataFrame, files: Sequence[Path]) -> pl.DataFrame:
    """Join what tables of advantages say of each sample, as :func:`join_samples` does; unchanged without tables."""
    if not files:
        return samples
    rated = pl.DataFrame(read_advantages(files, ("sample_id", "reward", "advantage", "dropped")))
    # In the order of STREAMS, so that the first of a sample's rows is that of its first stream.
    ordered = rated.sort(pl.col(STREAM).cast(pl.Enum(STREAMS)), maintain_order=True)
    of_streams = [
        pl.col("advantage").filter(pl.col(STREAM) == stream).first().alias(ADVANTAGE_COLUMN + stream)
        for stream in STREAMS
        if stream in rated[STREAM]
    ]
    kept = pl.col("reward", "advantage", "dropped").first()
    by_sample = ordered.group_by("sample_id", maintain_order=True).agg(
        kept, pl.col(STREAM).alias("streams"), *of_streams
    )
    return samples.join(by_sample, **ONE_EACH)


def tables_of(folder: Path) -> list[Path]:
    """Return the Parquet files of an artifact's table, without those of images and states."""
    return sorted(path for path in folder.glob("*.parquet") if not path.match(IMAGES))
