"""Stored samples with their previous and their later scores, as one frame."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from PIL import Image

from tasks.reports.images import read_images
from tasks.reports.rescoring import AFTER, BEFORE
from tasks.reports.samples import read_samples
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

_COLUMNS = ("sample_id", "group_id", "prompt", "dataset")


@dataclass(frozen=True)
class RescoredIteration:
    """One iteration, scored twice.

    Attributes:
        iteration: number, from 1.
        previous: sampling rounds with the scores that the run was trained on.
        previous_advantages: advantages of the samples of all rounds.
        rounds: the same rollouts with the later scores.
        advantages: computed from these.
    """

    iteration: int
    previous: tuple[SamplingRound, ...]
    previous_advantages: ArtifactRef
    rounds: tuple[SamplingRound, ...]
    advantages: ArtifactRef


def read_rescored(store: ArtifactStore, iterations: Sequence[RescoredIteration]) -> pl.DataFrame:
    """Read one row per sample, as :func:`tasks.reports.rescoring.compare` needs them.

    Raises:
        StaleReferenceError: a table is missing or changed.
    """
    with tempfile.TemporaryDirectory() as fetched:
        frames = [_read_iteration(store, each, Path(fetched)) for each in iterations]
    return pl.concat(frames, how="diagonal").with_columns(run=pl.lit(store.run))


def _read_iteration(store: ArtifactStore, each: RescoredIteration, fetched: Path) -> pl.DataFrame:
    def local(reference: ArtifactRef) -> Path:
        return store.local_files(reference, fetched / reference.folder)

    rollouts = [local(part.rollouts) for part in each.rounds]
    columns: dict[str, list[object]] = {}
    sides = (
        ("before", BEFORE, each.previous, each.previous_advantages),
        ("after", AFTER, each.rounds, each.advantages),
    )
    for side, prefix, rounds, advantages in sides:
        rewards = [(label, local(scores)) for part in rounds for label, scores in part.rewards.items()]
        table = read_samples(rollouts, rewards, [local(advantages)], _COLUMNS)
        columns |= {name: [row[name] for row in table.rows] for name in _COLUMNS}
        columns |= {f"{name}_{side}": [row[name] for row in table.rows] for name in ("reward", "advantage")}
        for label, values in table.scores.items():
            columns[prefix + label] = [values.get(row["sample_id"]) for row in table.rows]
    numbers = {name: pl.Float64 for name in columns if name not in _COLUMNS}
    return pl.DataFrame(columns, schema_overrides=numbers).with_columns(iteration=pl.lit(each.iteration))


def read_outputs(
    store: ArtifactStore, iterations: Sequence[RescoredIteration], samples: pl.DataFrame
) -> Mapping[tuple[str, str], Image.Image | str]:
    """Read images or texts of these samples by run and sample id; other iterations are not opened.

    Args:
        store: the run; samples of other runs are ignored.
        iterations: where the samples may be.
        samples: with the columns run, iteration and sample_id.
    """
    wanted = samples.filter(pl.col("run") == store.run)
    outputs: dict[tuple[str, str], Image.Image | str] = {}
    with tempfile.TemporaryDirectory() as fetched:
        for each in iterations:
            names = wanted.filter(pl.col("iteration") == each.iteration)["sample_id"].to_list()
            for part in each.rounds if names else ():
                folder = store.local_files(part.rollouts, Path(fetched) / part.rollouts.folder)
                outputs |= {(store.run, name): output for name, output in _outputs(folder, names).items()}
    return outputs


def _outputs(folder: Path, names: Sequence[str]) -> Mapping[str, Image.Image | str]:
    table = read_samples([folder], (), (), ("sample_id", "completion"))
    if not table.is_text:
        return read_images(folder, names)
    return {row["sample_id"]: row["completion"] for row in table.rows if row["sample_id"] in names}
