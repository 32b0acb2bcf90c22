"""The samples of an iteration or an evaluation: their stored tables joined."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from grpo_core.image_size import ImageSize
from grpo_core.streams import STREAMS, Stream
from tasks.reports.images import read_images
from tasks.runs.layout import ADVANTAGES_FILE, PARTS, SCORES_FILE, STATES
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.advantages import STREAM, read_advantages

_RATED = ("reward", "advantage", "dropped")
_UNRATED: Mapping[str, Any] = MappingProxyType(
    {**dict.fromkeys(_RATED), "leads": True, "advantages": {"advantage": None}}
)

TRAITS = ("dataset", "size")
"""Columns that a report shows where groups differ in them."""

Row = dict[str, Any]
"""Values of one sample by column."""

Fetch = Callable[[ArtifactRef], Path]
"""Returns an artifact's folder on this machine."""


@dataclass(frozen=True)
class Samples:
    """Stored samples with their scores.

    Attributes:
        rows: the requested columns, of images with width and height also `size`, such as 64x96; reward, advantage and
            dropped by the sample's first stream; `leads`, whether that is the first of all; `advantages`, those of all
            its streams by a title; and `breakdown`, the value by reward, before weights; in the stored order, at least
            one. None stands for what does not apply or was not computed.
        folders: the rollouts of each sampling round on this machine.
        stream: the first that has rewards.
    """

    rows: Sequence[Row]
    folders: Sequence[Path]
    stream: Stream

    @property
    def is_text(self) -> bool:
        """Whether the samples are texts."""
        return "completion" in self.rows[0]

    @property
    def groups(self) -> list[list[Row]]:
        """The rows by group, in the order in which their prompts were drawn: stored are those of a size together."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row["group_id"], []).append(row)
        # The ids of later sampling rounds are longer.
        return [groups[group_id] for group_id in sorted(groups, key=lambda each: (len(each), each))]

    @property
    def varying(self) -> list[str]:
        """The traits in which the samples differ."""
        return varying([self.rows])

    def images(self, names: Collection[str], sides: Mapping[str, int] | None = None) -> dict[str, Image.Image]:
        """Read the images of these samples, as :func:`read_images` does for one sampling round."""
        return {name: image for folder in self.folders for name, image in read_images(folder, names, sides).items()}


def read_samples(
    fetch: Fetch,
    rollouts: Iterable[ArtifactRef],
    rewards: Iterable[tuple[str, ArtifactRef]],
    advantages: Iterable[ArtifactRef],
    columns: Sequence[str],
) -> Samples:
    """Join the stored tables of samples.

    There are rollouts of at least one sampling round, any number of scores per label, and without advantages the
    samples have no rewards. Of the rollouts' columns, those that the modality does not have are left out.
    """
    folders = [fetch(part) for part in rollouts]
    rows = [row for folder in folders for path in sorted(folder.glob(PARTS)) for row in _read_rows(path, columns)]
    for row in rows:
        if "width" in row:
            row["size"] = str(ImageSize(row["width"], row["height"]))
    return Samples(rows, folders, _join_scores(rows, fetch, rewards, advantages))


def _join_scores(
    rows: Sequence[Row],
    fetch: Fetch,
    rewards: Iterable[tuple[str, ArtifactRef]],
    advantages: Iterable[ArtifactRef],
) -> Stream:
    """Set what stored scores and advantages say of each row, and return the first stream that has rewards."""
    rated, stream = _read_rated([fetch(part) / ADVANTAGES_FILE for part in advantages])
    scores: dict[str, dict[str, float | None]] = {}
    for label, part in rewards:
        values = _read_rows(fetch(part) / SCORES_FILE, ("sample_id", "value"))
        scores.setdefault(label, {}).update((row["sample_id"], row["value"]) for row in values)
    for row in rows:
        row |= rated.get(row["sample_id"], _UNRATED)
        row["breakdown"] = {label: values.get(row["sample_id"]) for label, values in scores.items()}
    return stream


def _read_rated(files: Sequence[Path]) -> tuple[dict[str, Row], Stream]:
    """Read reward and advantages of each sample, and the first stream of all."""
    table = read_advantages(files, ("sample_id", *_RATED)).to_pylist() if files else []
    by_sample: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in table:
        by_sample[row["sample_id"]][row[STREAM]] = row
    found = {row[STREAM] for row in table}
    streams = [stream for stream in STREAMS if stream in found] or [STREAMS[0]]
    rated: dict[str, Row] = {}
    for sample_id, rows in by_sample.items():
        own = [stream for stream in streams if stream in rows]
        rated[sample_id] = {
            **{name: rows[own[0]][name] for name in _RATED},
            "leads": own[0] == streams[0],
            "advantages": {
                "advantage" if len(streams) == 1 else f"advantage, {stream}": rows[stream]["advantage"]
                for stream in own
            },
        }
    return rated, streams[0]


def verified(store: ArtifactStore, fetched: Path) -> Fetch:
    """Verify artifacts when they are read; remote ones are copied below the folder `fetched`."""
    return lambda reference: store.local_files(reference, fetched / reference.folder, without=(STATES,))


def _read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    file = pq.ParquetFile(path)
    known = [name for name in columns if name in file.schema_arrow.names]
    rows: list[Row] = file.read(columns=known).to_pylist()
    return rows


def varying(parts: Iterable[Iterable[Row]]) -> list[str]:
    """Return the traits that have more than one value in all of the rows together."""
    rows = [row for part in parts for row in part]
    return [name for name in TRAITS if len({row[name] for row in rows if name in row}) > 1]


def best_first(rows: Iterable[Row]) -> list[Row]:
    """Sort the samples that have a reward, highest first; the order is kept where rewards are equal.

    Those that have one only of a later stream are left out: it can be of other rewards.
    """
    return sorted((row for row in rows if row["leads"] and row["reward"] is not None), key=lambda row: -row["reward"])
