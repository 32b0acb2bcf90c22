"""The samples of an iteration or an evaluation: their stored tables joined."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from PIL import Image

from grpo_core.image_size import ImageSize
from grpo_core.streams import STREAMS, Stream
from tasks.reports.images import read_images
from tasks.runs.layout import ADVANTAGE_COLUMN, REWARD_COLUMN
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import Read

_UNRATED: Mapping[str, Any] = MappingProxyType(
    {**dict.fromkeys(("reward", "advantage", "dropped")), "leads": True, "advantages": {"advantage": None}}
)

TRAITS = ("dataset", "size")
"""Columns that a report shows where groups differ in them."""

Row = dict[str, Any]
"""Values of one sample by column."""


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
    read: Read,
    rollouts: Iterable[ArtifactRef],
    rewards: Iterable[tuple[str, ArtifactRef]],
    advantages: Iterable[ArtifactRef],
    columns: Sequence[str],
) -> Samples:
    """Join the stored tables of samples as `tasks.runs.samples.read_samples` does, for reports."""
    # Polars takes a tenth of a second to import, which a command that is refused does not need.
    from tasks.runs import samples as stored

    parts = list(rollouts)
    table = stored.read_samples(read, parts, rewards, advantages, columns)
    streams = [each for each in STREAMS if f"{ADVANTAGE_COLUMN}{each}" in table.columns] or [STREAMS[0]]
    rows = [_row(row, streams) for row in table.iter_rows(named=True)]
    return Samples(rows, [read(part) for part in parts], streams[0])


def _row(stored: Row, streams: Sequence[Stream]) -> Row:
    """Lay out what the joined tables say of a sample."""
    own = stored.pop("streams", None)
    row = {name: value for name, value in stored.items() if not name.startswith((REWARD_COLUMN, ADVANTAGE_COLUMN))}
    if "width" in row:
        row["size"] = str(ImageSize(row["width"], row["height"]))
    if own is None:
        row |= _UNRATED
    else:
        row["leads"] = own[0] == streams[0]
        titles = {each: "advantage" if len(streams) == 1 else f"advantage, {each}" for each in own}
        row["advantages"] = {title: stored[ADVANTAGE_COLUMN + each] for each, title in titles.items()}
    labels = [name.removeprefix(REWARD_COLUMN) for name in stored if name.startswith(REWARD_COLUMN)]
    return row | {"breakdown": {label: stored[REWARD_COLUMN + label] for label in labels}}


def varying(parts: Iterable[Iterable[Row]]) -> list[str]:
    """Return the traits that have more than one value in all of the rows together."""
    rows = [row for part in parts for row in part]
    return [name for name in TRAITS if len({row[name] for row in rows if name in row}) > 1]


def best_first(rows: Iterable[Row]) -> list[Row]:
    """Sort the samples that have a reward, highest first; the order is kept where rewards are equal.

    Those that have one only of a later stream are left out: it can be of other rewards.
    """
    return sorted((row for row in rows if row["leads"] and row["reward"] is not None), key=lambda row: -row["reward"])
