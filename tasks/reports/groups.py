"""The samples of an iteration or an evaluation as reports show them: tables joined, groups best first."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from PIL import Image

from grpo_core.rollouts.streams import STREAMS, ImageSize, Stream
from tasks.reports.images import PromptImages, read_images
from tasks.runs.layout import ADVANTAGE_COLUMN, ADVANTAGES, REWARD_COLUMN, REWARDS, ROLLOUTS
from tasks.runs.reader import RunReader
from tasks.runs.run_view import StageArtifacts
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import Read

_UNRATED: Mapping[str, Any] = MappingProxyType(
    {**dict.fromkeys(("reward", "advantage", "dropped")), "leads": True, "advantages": {"advantage": None}}
)

TRAITS = ("dataset", "size")  # columns that a report shows where groups differ in them
Row = dict[str, Any]  # values of one sample by column


@dataclass(frozen=True)
class Samples:
    """Stored samples with their scores."""

    # The requested columns, of images with width and height also `size`, such as 64x96; reward, advantage and dropped
    # by the sample's first stream; `leads`, whether that is the first of all; `advantages`, those of all its streams by
    # a title; and `breakdown`, the value by reward, before weights; in the stored order, at least one. None stands for
    # what does not apply or was not computed.
    rows: Sequence[Row]
    folders: Sequence[Path]  # the rollouts of each sampling round on this machine
    stream: Stream  # the first that has rewards

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


def read_shown_samples(
    read: Read,
    rollouts: Iterable[ArtifactRef],
    rewards: Iterable[tuple[str, ArtifactRef]],
    advantages: Iterable[ArtifactRef],
    columns: Sequence[str],
) -> Samples:
    """Join the stored tables of samples as `tasks.runs.samples.join_samples` does, for reports."""
    # Polars takes a tenth of a second to import, which a command that is refused does not need.
    from tasks.runs import samples as stored

    parts = list(rollouts)
    table = stored.join_samples(read, parts, rewards, advantages, columns)
    streams = [each for each in STREAMS if f"{ADVANTAGE_COLUMN}{each}" in table.columns] or [STREAMS[0]]
    rows = [_row(row, streams) for row in table.iter_rows(named=True)]
    return Samples(rows, [read(part) for part in parts], streams[0])


def _row(stored: Row, streams: Sequence[Stream]) -> Row:
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
    """Sort the samples that have a reward of the first stream, highest first, else as they are stored."""
    return sorted((row for row in rows if row["leads"] and row["reward"] is not None), key=lambda row: -row["reward"])


LARGE, MEDIUM, SMALL = 320, 192, 96
"""Longest side in pixels of the best and worst image, of compared ones, and of the others; smaller ones are kept."""

_RECORDED = ("rollout_logprobs", "loss_mask", "denoising_logprobs")
"""Lists for :func:`summarize_actions`, read of shown samples only: of all they would be millions of Python objects."""

_SHOWN = (
    *("sample_id", "group_id", "prompt_id", "dataset", "prompt", "seed"),
    *("sources", "target_uri", "target_sha256", "completion", "width", "height"),
    *("finished", "window_start", "token_sample", "image_number"),
)


def _with_further_images(group: Sequence[Row]) -> list[Row]:
    """Sort a group best first, each sample before other images of its token sample, unrewarded last."""
    further: dict[int | None, list[Row]] = defaultdict(list)
    for row in group:
        if not row["leads"]:
            further[row.get("token_sample")].append(row)
    ordered = [each for row in best_first(group) for each in (row, *further.get(row.get("token_sample"), ()))]
    shown = {row["sample_id"] for row in ordered}
    return [*ordered, *(row for row in group if row["sample_id"] not in shown)]


@dataclass(frozen=True)
class Group:
    """The siblings of one prompt occurrence."""

    # Highest reward first, each before the other images of its token sample, those without a reward last; in the stored
    # order where rewards are equal. Besides the columns of :class:`Samples`, `actions` summarizes the recorded
    # log-probs of each stream, `length` is the number of trained tokens, and `output` is an RGB image, reduced where it
    # was large, or the complete text; None for an image that was pruned.
    samples: Sequence[Row]
    target: Image.Image | None  # target image; None where there is none, or it cannot be read
    sources: Sequence[Image.Image] = ()  # the images in the prompt, in their order, without those that cannot be read

    @property
    def ranked(self) -> list[Row]:
        """The samples that have a reward of the first stream, highest first."""
        return best_first(self.samples)

    @property
    def _rewards(self) -> list[float]:
        return [row["reward"] for row in self.ranked]

    @property
    def best(self) -> Row | None:
        """The sample with the highest reward; None where no sample has one."""
        return next(iter(self.ranked), None)

    @property
    def worst(self) -> Row | None:
        """The sample with the lowest reward; None with fewer than two rewards."""
        return self.ranked[-1] if len(self.ranked) > 1 else None

    @property
    def reward(self) -> float | None:
        """Mean over the samples that have one."""
        return fmean(self._rewards) if self._rewards else None

    @property
    def spread(self) -> float | None:
        """Highest minus lowest reward; None with fewer than two rewards."""
        return max(self._rewards) - min(self._rewards) if len(self._rewards) > 1 else None


@dataclass(frozen=True)
class Groups:
    """The first groups of an iteration or an evaluation."""

    shown: Sequence[Group] = ()
    total: int = 0  # number of all groups
    rounds: int = 0  # sampling rounds that they come from; more than one where groups without spread were replaced
    dropped: int = 0  # number of all groups that were left out of the update
    varying: Sequence[str] = ()  # the traits in which they differ

    @property
    def has_further_images(self) -> bool:
        """Whether a token sample has more than one image among them."""
        return any(not row["leads"] for group in self.shown for row in group.samples)

    def describe(self) -> str:
        """Describe how many groups were sampled in how many rounds, and how many were dropped."""
        times = "1 sampling round" if self.rounds == 1 else f"{self.rounds} sampling rounds"
        return f"{self.total} groups in {times}, {self.dropped} without spread left out of the update"


def read_stages(reader: RunReader, stages: StageArtifacts, fetched: Path) -> Samples:
    """Join the tables of rollouts with valid rewards and advantages, if any; remote ones are copied to `fetched`."""
    rewards = [(part.folder.rsplit("/", 1)[-1], part) for part in stages.get(REWARDS, ())]
    return read_shown_samples(
        lambda reference: reader.local_folder(reference, fetched),
        stages[ROLLOUTS],
        rewards,
        stages.get(ADVANTAGES, ()),
        _SHOWN,
    )


def read_groups(
    reader: RunReader,
    stages: StageArtifacts,
    fetched: Path,
    images_of: PromptImages,
    *,
    limit: int,
    side: int | None = None,
    ends: bool = False,
) -> Groups:
    """Read the first groups in the stored order, as :func:`read_stages`; without rollouts there are none.

    What the reader's memory has is not read again. `side` is the longest side of images in pixels, by default LARGE for
    the best and the worst of a group and SMALL for the others; with `ends`, no others are read.
    """
    if ROLLOUTS not in stages:
        return Groups()
    parts = tuple((part.uri, part.sha256) for each in stages.values() for part in each)
    return reader.memory.recall(
        (parts, limit, side, ends),
        lambda: _read_groups(read_stages(reader, stages, fetched), images_of, limit, side, ends),
    )


def _read_groups(table: Samples, images_of: PromptImages, limit: int, side: int | None, ends: bool) -> Groups:
    groups = table.groups
    shown = [_with_further_images(group) for group in groups[:limit]]
    if ends:
        ranked = [best_first(group) or group[:1] for group in shown]
        shown = [[*group[:1], *group[1:][-1:]] for group in ranked]
    return Groups(
        shown=show_groups(table, shown, images_of, side),
        total=len(groups),
        rounds=len(table.folders),
        dropped=sum(bool(group[0]["dropped"]) for group in groups),
        varying=table.varying,
    )


def show_groups(
    table: Samples, groups: Sequence[Sequence[Row]], images_of: PromptImages, side: int | None = None
) -> list[Group]:
    """Read the outputs, targets and sources of these groups of the table; sizes are as of :func:`read_groups`."""
    sides = {} if table.is_text else _sides(groups)
    if side is not None:
        sides = dict.fromkeys(sides, side)
    images = table.images(sides, sides)
    recorded = _recorded(table, [row["sample_id"] for group in groups for row in group])
    for row in (row for group in groups for row in group):
        row |= recorded[row["sample_id"]]
        row |= {"actions": summarize_actions(row), "length": sum(row.get("loss_mask") or ())}
        row["output"] = row["completion"] if table.is_text else images.get(row["sample_id"])
    return [
        Group(
            rows, images_of.target(rows[0].get("target_uri"), rows[0].get("target_sha256")), images_of.sources(rows[0])
        )
        for rows in groups
    ]


def _recorded(table: Samples, names: Sequence[str]) -> dict[str, Row]:
    """Read what is recorded of the actions of these samples."""
    import polars as pl

    from tasks.runs.samples import read_rollouts

    found = read_rollouts(table.folders, ("sample_id", *_RECORDED), pl.col("sample_id").is_in(names))
    return {row["sample_id"]: row for row in found.iter_rows(named=True)}


def _sides(groups: Iterable[Sequence[Row]]) -> dict[str, int]:
    """Choose the size of each image: large for the best and worst of a group, small for the others."""
    sides: dict[str, int] = {}
    for group in groups:
        names = [row["sample_id"] for row in group]
        ranked = [row["sample_id"] for row in best_first(group)]
        large = (ranked[0], ranked[-1]) if ranked else names[:2]
        sides |= dict.fromkeys(names, SMALL) | dict.fromkeys(large, LARGE)
    return sides


class ActionSummary(NamedTuple):
    """The log-probs of one stream of a sample: what they are of, their values, and their meaning in full."""

    title: str
    value: str
    meaning: str


def summarize_actions(row: Mapping[str, Any]) -> list[ActionSummary]:
    """Summarize what was recorded of a stored sample; nothing for a stream that was not."""
    found = []
    if row.get("rollout_logprobs") is not None:
        trained = [value for value, kept in zip(row["rollout_logprobs"], row["loss_mask"], strict=True) if kept]
        value = f"{math.fsum(trained):.1f} over {len(trained)} tokens"
        found.append(ActionSummary("log-prob", value, "sum over the tokens, in nats, recorded while sampling"))
    # Images that were sampled without noisy steps have an empty list.
    if values := row.get("denoising_logprobs"):
        first = row["window_start"] + 1
        steps = f"step {first}" if len(values) == 1 else f"steps {first} to {first + len(values) - 1}"
        meaning = "log-prob of each noisy denoising step, recorded while sampling; the first step is 1"
        found.append(ActionSummary(f"log-prob, {steps}", ", ".join(f"{value:.4f}" for value in values), meaning))
    return found
