"""The samples of an iteration or an evaluation: their stored tables joined, and each group best sample first."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from grpo_core.image_size import ImageSize
from tasks.reports.images import TargetReader, read_images
from tasks.runs.layout import ADVANTAGES, ADVANTAGES_FILE, REWARDS, ROLLOUTS, SCORES_FILE, STATES
from tasks.runs.reader import RunReader
from tasks.runs.run_view import Stages
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

LARGE, MEDIUM, SMALL = 320, 192, 96
"""Longest side in pixels of the best and worst image, of compared ones, and of the others; smaller ones are kept."""

_SHOWN = (
    *("sample_id", "group_id", "prompt_id", "dataset", "prompt", "rollout_logprobs", "loss_mask", "finished", "seed"),
    *("target_uri", "target_sha256", "completion", "width", "height"),
)
_RATED = ("reward", "advantage", "dropped")

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
        rows: the requested columns, of images with width and height also `size`, such as 64x96, and reward, advantage,
            dropped and `breakdown`, the value by reward, before weights; in the stored order, at least one. None stands
            for what does not apply or was not computed.
        folders: the rollouts of each sampling round on this machine.
    """

    rows: Sequence[Row]
    folders: Sequence[Path]

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
    rated = {
        row.pop("sample_id"): row
        for part in advantages
        for row in _read_rows(fetch(part) / ADVANTAGES_FILE, ("sample_id", *_RATED))
    }
    scores: dict[str, dict[str, float | None]] = {}
    for label, part in rewards:
        values = _read_rows(fetch(part) / SCORES_FILE, ("sample_id", "value"))
        scores.setdefault(label, {}).update((row["sample_id"], row["value"]) for row in values)
    folders = [fetch(part) for part in rollouts]
    rows = [row for folder in folders for path in sorted(folder.glob("*.parquet")) for row in _read_rows(path, columns)]
    for row in rows:
        if "width" in row:
            row["size"] = str(ImageSize(row["width"], row["height"]))
        row |= rated.get(row["sample_id"], dict.fromkeys(_RATED))
        row["breakdown"] = {label: values.get(row["sample_id"]) for label, values in scores.items()}
    return Samples(rows, folders)


def verified(store: ArtifactStore, fetched: Path) -> Fetch:
    """Verify artifacts when they are read; remote ones are copied below the folder `fetched`."""
    return lambda reference: store.local_files(reference, fetched / reference.folder, without=STATES)


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
    """Sort the samples that have a reward, highest first; the order is kept where rewards are equal."""
    return sorted((row for row in rows if row["reward"] is not None), key=lambda row: -row["reward"])


@dataclass(frozen=True)
class Group:
    """The siblings of one prompt occurrence.

    Attributes:
        samples: highest reward first, those without one last; in the stored order where rewards are equal. Besides
            the columns of :class:`Samples`, `logprob` is the sum over the trained tokens, in nats, recorded while
            sampling, `length` is their number, and `output` is an RGB image, reduced where it was large, or the
            complete text; None for an image that was pruned.
        target: target image; None where there is none, or it cannot be read.
    """

    samples: Sequence[Row]
    target: Image.Image | None

    @property
    def _rewards(self) -> list[float]:
        return [row["reward"] for row in self.samples if row["reward"] is not None]

    @property
    def best(self) -> Row | None:
        """The sample with the highest reward; None where no sample has one."""
        return self.samples[0] if self._rewards else None

    @property
    def worst(self) -> Row | None:
        """The sample with the lowest reward; None with fewer than two rewards."""
        return self.samples[len(self._rewards) - 1] if len(self._rewards) > 1 else None

    @property
    def reward(self) -> float | None:
        """Mean over the samples that have one."""
        return math.fsum(self._rewards) / len(self._rewards) if self._rewards else None

    @property
    def spread(self) -> float | None:
        """Highest minus lowest reward; None with fewer than two rewards."""
        return max(self._rewards) - min(self._rewards) if len(self._rewards) > 1 else None


@dataclass(frozen=True)
class Groups:
    """The first groups of an iteration or an evaluation.

    Attributes:
        shown: these groups.
        total: number of all groups.
        rounds: sampling rounds that they come from; more than one where groups without spread were replaced.
        dropped: number of all groups that were left out of the update.
        varying: the traits in which they differ.
    """

    shown: Sequence[Group] = ()
    total: int = 0
    rounds: int = 0
    dropped: int = 0
    varying: Sequence[str] = ()

    def describe(self) -> str:
        """Describe how many groups were sampled in how many rounds, and how many were dropped."""
        times = "1 sampling round" if self.rounds == 1 else f"{self.rounds} sampling rounds"
        return f"{self.total} groups in {times}, {self.dropped} without spread left out of the update"


def read_stages(reader: RunReader, stages: Stages, fetched: Path) -> Samples:
    """Join the tables of an iteration or an evaluation that has rollouts.

    Of the verified stages, rewards and advantages may be missing; remote ones are copied below the folder `fetched`.
    """
    rewards = [(part.folder.rsplit("/", 1)[-1], part) for part in stages.get(REWARDS, ())]
    return read_samples(
        lambda reference: reader.local_folder(reference, fetched),
        stages[ROLLOUTS],
        rewards,
        stages.get(ADVANTAGES, ()),
        _SHOWN,
    )


def read_groups(
    reader: RunReader, stages: Stages, fetched: Path, targets: TargetReader, *, limit: int, side: int | None = None
) -> Groups:
    """Read the first groups in the stored order, as :func:`read_stages`; without rollouts there are none.

    Images are at most `side` pixels large; by default the best and the worst of a group LARGE, the others SMALL.
    """
    if ROLLOUTS not in stages:
        return Groups()
    table = read_stages(reader, stages, fetched)
    groups = table.groups
    shown = [[*best_first(group), *(row for row in group if row["reward"] is None)] for group in groups[:limit]]
    return Groups(
        shown=show_groups(table, shown, targets, side),
        total=len(groups),
        rounds=len(table.folders),
        dropped=sum(bool(group[0]["dropped"]) for group in groups),
        varying=table.varying,
    )


def show_groups(
    table: Samples, groups: Sequence[Sequence[Row]], targets: TargetReader, side: int | None = None
) -> list[Group]:
    """Read the outputs and targets of these groups of the table; sizes are as of :func:`read_groups`."""
    sides = {} if table.is_text else _sides(groups)
    if side is not None:
        sides = dict.fromkeys(sides, side)
    images = table.images(sides, sides)
    for row in (row for group in groups for row in group):
        trained = [value for value, kept in zip(row["rollout_logprobs"], row["loss_mask"], strict=True) if kept]
        row |= {"logprob": math.fsum(trained), "length": len(trained)}
        row["output"] = row["completion"] if table.is_text else images.get(row["sample_id"])
    return [Group(rows, targets.read(rows[0].get("target_uri"), rows[0].get("target_sha256"))) for rows in groups]


def _sides(groups: Iterable[Sequence[Row]]) -> dict[str, int]:
    """Choose the size of each image: large for the best and worst of a group, small for the others."""
    sides: dict[str, int] = {}
    for group in groups:
        names = [row["sample_id"] for row in group]
        known = sum(row["reward"] is not None for row in group)
        large = (names[0], names[known - 1]) if known else names[:2]
        sides |= dict.fromkeys(names, SMALL) | dict.fromkeys(large, LARGE)
    return sides
