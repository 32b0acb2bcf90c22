"""Stored samples with their previous and their later scores, as one frame."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from PIL import Image

from tasks.reports.images import read_images
from tasks.reports.rescoring.compare import AFTER, BEFORE
from tasks.runs.layout import SCORES_FILE
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore


@dataclass(frozen=True)
class RescoredIteration:
    """One iteration, scored twice.

    Attributes:
        iteration: its number.
        previous: its draws with the scores that it was trained on.
        former_advantages: of the samples of all draws.
        draws: the same rollouts with the later scores.
        advantages: that these make.
    """

    iteration: int
    previous: tuple[SamplingRound, ...]
    previous_advantages: ArtifactRef
    rounds: tuple[SamplingRound, ...]
    advantages: ArtifactRef


def read_rescored(store: ArtifactStore, iterations: Sequence[RescoredIteration]) -> pl.DataFrame:
    """A row a sample, as :func:`tasks.reports.rescoring.compare.compare` wants them.

    Raises:
        StaleReferenceError: a table is missing or changed.
    """
    with tempfile.TemporaryDirectory() as fetched:
        tables = _Tables(store, Path(fetched))
        frames = [_frame(tables, each) for each in iterations]
    return pl.concat(frames, how="diagonal").with_columns(run=pl.lit(store.run))


@dataclass
class _Tables:
    """Tables of artifacts, each verified and read once."""

    store: ArtifactStore
    fetched: Path

    def scores(self, reference: ArtifactRef) -> pl.DataFrame:
        return pl.read_parquet(self._folder(reference) / SCORES_FILE, columns=["sample_id", "value"])

    def columns(self, reference: ArtifactRef, columns: Sequence[str]) -> pl.DataFrame:
        return pl.read_parquet(sorted(self._folder(reference).glob("*.parquet")), columns=list(columns))

    def _folder(self, reference: ArtifactRef) -> Path:
        return self.store.local_files(reference, self.fetched / reference.folder)


def _frame(tables: _Tables, each: RescoredIteration) -> pl.DataFrame:
    names = ["sample_id", "group_id", "prompt", "dataset"]
    frame = pl.concat([tables.columns(draw.rollouts, names) for draw in each.rounds])
    for side, reference in (("before", each.previous_advantages), ("after", each.advantages)):
        rated = tables.columns(reference, ["sample_id", "reward", "advantage"])
        renamed = rated.rename({"reward": f"reward_{side}", "advantage": f"advantage_{side}"})
        frame = frame.join(renamed, on="sample_id", how="left", validate="1:1", maintain_order="left")
    for prefix, rounds in ((BEFORE, each.previous), (AFTER, each.rounds)):
        for label in rounds[0].rewards:
            scores = pl.concat([tables.scores(draw.rewards[label]) for draw in rounds])
            renamed = scores.rename({"value": prefix + label})
            frame = frame.join(renamed, on="sample_id", how="left", validate="1:1", maintain_order="left")
    return frame.with_columns(iteration=pl.lit(each.iteration))


def read_outputs(
    store: ArtifactStore, iterations: Sequence[RescoredIteration], samples: pl.DataFrame
) -> Mapping[tuple[str, str], Image.Image | str]:
    """Images or texts of these samples of the run, by run and sample id; of other iterations nothing is opened."""
    wanted = samples.filter(pl.col("run") == store.run)
    outputs: dict[tuple[str, str], Image.Image | str] = {}
    with tempfile.TemporaryDirectory() as fetched:
        for each in iterations:
            names = wanted.filter(pl.col("iteration") == each.iteration)["sample_id"].to_list()
            for draw in each.rounds if names else ():
                folder = store.local_files(draw.rollouts, Path(fetched) / draw.rollouts.folder)
                outputs |= {(store.run, name): output for name, output in _outputs(folder, names).items()}
    return outputs


def _outputs(folder: Path, names: Sequence[str]) -> Mapping[str, Image.Image | str]:
    files = sorted(folder.glob("*.parquet"))
    if "completion" not in pl.scan_parquet(files).collect_schema():
        return read_images(folder, names)
    rows = pl.read_parquet(files, columns=["sample_id", "completion"]).filter(pl.col("sample_id").is_in(list(names)))
    return dict(zip(rows["sample_id"], rows["completion"], strict=True))
