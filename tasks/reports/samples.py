"""The samples of an iteration or an evaluation: their stored tables joined, and each group best sample first."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from tasks.reports.images import read_images
from tasks.reports.target_reader import TargetReader
from tasks.runs.layout import ADVANTAGES, ADVANTAGES_FILE, REWARDS, ROLLOUTS, SCORES_FILE
from tasks.runs.reader import RunReader
from tasks.runs.run_view import Stages

LARGE, SMALL = 320, 96
"""Longest side in pixels of the best and worst image, and of the other siblings; smaller ones are kept."""

_COLUMNS = ("sample_id", "group_id", "dataset", "prompt", "rollout_logprobs", "loss_mask", "finished", "seed")
_OUTPUT_COLUMNS = ("target_uri", "target_sha256", "completion")
_RATED = ("reward", "advantage", "dropped")

Row = dict[str, Any]
"""Values of one sample by column."""


@dataclass(frozen=True)
class SampleView:
    """One sample and its scores.

    Attributes:
        sample_id: joins every table.
        seed: seed that its tokens were sampled with.
        logprob: sum over its trained tokens, in nats, recorded while sampling.
        length: number of trained tokens.
        finished: False where it was truncated at its maximum length.
        reward: None where no reward applies or none was computed.
        advantage: None likewise, and where its group was dropped.
        breakdown: value by reward, before weights; None where the reward does not apply.
        output: an RGB image, reduced where it was large; or the complete text; None for an image that was pruned.
    """

    sample_id: str
    seed: int
    logprob: float
    length: int
    finished: bool
    reward: float | None
    advantage: float | None
    breakdown: Mapping[str, float | None]
    output: Image.Image | str | None


@dataclass(frozen=True)
class GroupView:
    """The siblings of one prompt occurrence.

    Attributes:
        group_id: id of the occurrence.
        dataset: the prompt set that it comes from.
        prompt: text of the prompt.
        dropped: the group has no spread and was left out of the update.
        target: target image; None where there is none, or it cannot be read.
        samples: highest reward first, those without one last; in the stored order where rewards are equal.
    """

    group_id: str
    dataset: str
    prompt: str
    dropped: bool
    target: Image.Image | None
    samples: tuple[SampleView, ...]

    @property
    def _rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples if sample.reward is not None]

    @property
    def best(self) -> SampleView | None:
        """The sample with the highest reward; None where no sample has one."""
        return self.samples[0] if self._rewards else None

    @property
    def worst(self) -> SampleView | None:
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
        datasets: names of the prompt sets that they come from, sorted.
    """

    shown: tuple[GroupView, ...]
    total: int
    rounds: int
    dropped: int
    datasets: tuple[str, ...]

    def describe(self) -> str:
        """Describe how many groups were sampled in how many rounds, and how many were dropped."""
        times = "1 sampling round" if self.rounds == 1 else f"{self.rounds} sampling rounds"
        return f"{self.total} groups in {times}, {self.dropped} without spread left out of the update"


@dataclass(frozen=True)
class SampleTable:
    """Stored samples with their scores.

    Attributes:
        rows: the requested columns, and reward, advantage and dropped; in the stored order, at least one.
        scores: value by reward and sample.
    """

    rows: Sequence[Row]
    scores: Mapping[str, Mapping[str, float | None]]

    @property
    def is_text(self) -> bool:
        """Whether the samples are texts."""
        return "completion" in self.rows[0]

    @property
    def groups(self) -> list[list[Row]]:
        """The rows by group."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row["group_id"], []).append(row)
        return list(groups.values())

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of the prompt sets, sorted."""
        return tuple(sorted({row["dataset"] for row in self.rows}))


def read_samples(
    rollouts: Iterable[Path],
    rewards: Iterable[tuple[str, Path]],
    advantages: Iterable[Path],
    columns: Sequence[str],
) -> SampleTable:
    """Join the stored tables of samples.

    Args:
        rollouts: folders, one per sampling round, at least one.
        rewards: label and folder of each reward's scores, any number per label.
        advantages: folders of advantages; without any, the samples have no rewards.
        columns: columns of the rollouts; those that the modality does not have are left out.
    """
    rated = {}
    for folder in advantages:
        for row in _read_rows(folder / ADVANTAGES_FILE, ("sample_id", *_RATED)):
            rated[row.pop("sample_id")] = row
    scores: dict[str, dict[str, float | None]] = {}
    for label, folder in rewards:
        values = _read_rows(folder / SCORES_FILE, ("sample_id", "value"))
        scores.setdefault(label, {}).update((row["sample_id"], row["value"]) for row in values)
    rows = [
        row for folder in rollouts for path in sorted(folder.glob("*.parquet")) for row in _read_rows(path, columns)
    ]
    unrated = dict.fromkeys(_RATED)
    return SampleTable([row | rated.get(row["sample_id"], unrated) for row in rows], scores)


def _read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    file = pq.ParquetFile(path)
    known = [name for name in columns if name in file.schema_arrow.names]
    rows: list[Row] = file.read(columns=known).to_pylist()
    return rows


def best_first(rows: Iterable[Row]) -> list[Row]:
    """Sort the samples that have a reward, highest first; the order is kept where rewards are equal."""
    return sorted((row for row in rows if row["reward"] is not None), key=lambda row: -row["reward"])


def read_groups(reader: RunReader, stages: Stages, fetched: Path, targets: TargetReader, *, limit: int) -> Groups:
    """Read groups in the stored order; without rollouts there are none.

    Args:
        reader: reader of the run.
        stages: verified artifacts; rewards and advantages may be missing.
        fetched: folder for copies of remote artifacts.
        targets: reads the targets.
        limit: maximum number of groups that are read.
    """
    folders = {
        stage: [(part.folder.rsplit("/", 1)[-1], reader.local_folder(part, fetched)) for part in parts]
        for stage, parts in stages.items()
        if stage in (ROLLOUTS, REWARDS, ADVANTAGES)
    }
    rollouts = [folder for _, folder in folders.get(ROLLOUTS, ())]
    if not rollouts:
        return Groups((), 0, 0, 0, ())
    advantages = [folder for _, folder in folders.get(ADVANTAGES, ())]
    table = read_samples(rollouts, folders.get(REWARDS, ()), advantages, (*_COLUMNS, *_OUTPUT_COLUMNS))
    groups = table.groups
    shown = [[*best_first(group), *(row for row in group if row["reward"] is None)] for group in groups[:limit]]
    sides = {} if table.is_text else _sides(shown)
    images = {name: image for folder in rollouts for name, image in read_images(folder, sides, sides).items()}
    return Groups(
        shown=tuple(_group(group, table.scores, images, targets) for group in shown),
        total=len(groups),
        rounds=len(rollouts),
        dropped=sum(bool(group[0]["dropped"]) for group in groups),
        datasets=table.datasets,
    )


def _sides(groups: Sequence[Sequence[Row]]) -> dict[str, int]:
    """Choose the size of each image: large for the best and worst of a group, small for the others."""
    sides: dict[str, int] = {}
    for group in groups:
        names = [row["sample_id"] for row in group]
        known = sum(row["reward"] is not None for row in group)
        large = (names[0], names[known - 1]) if known else names[:2]
        sides |= dict.fromkeys(names, SMALL) | dict.fromkeys(large, LARGE)
    return sides


def _group(
    group: Sequence[Row],
    scores: Mapping[str, Mapping[str, float | None]],
    images: Mapping[str, Image.Image],
    targets: TargetReader,
) -> GroupView:
    first = group[0]
    return GroupView(
        group_id=first["group_id"],
        dataset=first["dataset"],
        prompt=first["prompt"],
        dropped=bool(first["dropped"]),
        target=targets.read(first.get("target_uri"), first.get("target_sha256")),
        samples=tuple(_sample(row, scores, images) for row in group),
    )


def _sample(
    row: Row, scores: Mapping[str, Mapping[str, float | None]], images: Mapping[str, Image.Image]
) -> SampleView:
    name = row["sample_id"]
    trained = [value for value, kept in zip(row["rollout_logprobs"], row["loss_mask"], strict=True) if kept]
    return SampleView(
        sample_id=name,
        seed=row["seed"],
        logprob=math.fsum(trained),
        length=len(trained),
        finished=row["finished"],
        reward=row["reward"],
        advantage=row["advantage"],
        breakdown={label: values.get(name) for label, values in scores.items()},
        output=row["completion"] if "completion" in row else images.get(name),
    )
