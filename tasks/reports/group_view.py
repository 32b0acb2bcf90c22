"""The samples of an iteration or an evaluation: each group with its best and worst sibling."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from grpo_core.rewards.image_files import decode_stored
from tasks.reports.group_records import Groups, GroupView, SampleView
from tasks.reports.images import shrunk
from tasks.reports.target_reader import TargetReader
from tasks.runs.layout import ADVANTAGES, ADVANTAGES_FILE, REWARDS, ROLLOUTS, SCORES_FILE
from tasks.runs.reader import RunReader
from tasks.runs.run_view import Stages

LARGE, SMALL = 320, 96
"""Longest side in pixels of the best and worst image, and of the other siblings; smaller ones stay as they are."""

_READ = ["sample_id", "group_id", "dataset", "prompt", "rollout_logprobs", "loss_mask", "finished", "seed"]
_TARGET, _TEXT = ["target_uri", "target_sha256"], "completion"

Row = Mapping[str, Any]


def read_groups(reader: RunReader, stages: Stages, fetched: Path, targets: TargetReader, *, limit: int) -> Groups:
    """Groups in the order drawn, as far as their stages are there; none without rollouts.

    Args:
        reader: of the run.
        stages: whole artifacts; rewards and advantages may be missing.
        fetched: folder for copies of remote artifacts.
        targets: reads the targets.
        limit: most groups that are read.
    """
    folders = [reader.local_folder(reference, fetched) for reference in stages.get(ROLLOUTS, ())]
    files = [path for folder in folders for path in sorted(folder.glob("*.parquet"))]
    by_group: dict[str, list[Row]] = {}
    for row in _read_rows(files):
        by_group.setdefault(row["group_id"], []).append(row)
    kept = list(by_group.values())[:limit]
    thoughts = _read_thoughts(reader, stages, fetched)
    ranked = [sorted(group, key=thoughts.rank) for group in kept]
    images = _read_images(files, _sides(ranked, thoughts))
    return Groups(
        shown=tuple(_group(group, thoughts, images, targets) for group in ranked),
        total=len(by_group),
        rounds=len(folders),
        dropped=len(thoughts.dropped),
        datasets=tuple(sorted({group[0]["dataset"] for group in by_group.values()})),
    )


def _read_rows(files: Sequence[Path]) -> Iterator[Row]:
    for path in files:
        file = pq.ParquetFile(path)
        columns = [*_READ, *([_TEXT] if _TEXT in file.schema_arrow.names else _TARGET)]
        yield from file.read(columns=columns).to_pylist()


@dataclass(frozen=True)
class SampleScores:
    """What later stages say of the samples.

    Attributes:
        rated: reward and advantage by sample.
        dropped: groups that were left out.
        scores: value by reward and sample.
    """

    rated: Mapping[str, tuple[float | None, float | None]]
    dropped: frozenset[str]
    scores: Mapping[str, Mapping[str, float | None]]

    def reward(self, row: Row) -> float | None:
        """The reward of a sample; None where it has none."""
        return self.rated.get(row["sample_id"], (None, None))[0]

    def rank(self, row: Row) -> float:
        """The sort key that puts the highest reward first."""
        reward = self.reward(row)
        return math.inf if reward is None else -reward


def _read_thoughts(reader: RunReader, stages: Stages, fetched: Path) -> SampleScores:
    columns = ["sample_id", "group_id", "reward", "advantage", "dropped"]
    rows: list[Row] = []
    for reference in stages.get(ADVANTAGES, ()):
        table = pq.ParquetFile(reader.local_folder(reference, fetched) / ADVANTAGES_FILE)
        rows += table.read(columns=columns).to_pylist()
    scores: dict[str, dict[str, float | None]] = {}
    for reference in stages.get(REWARDS, ()):
        path = reader.local_folder(reference, fetched) / SCORES_FILE
        table = pq.ParquetFile(path).read(columns=["sample_id", "value"])
        values = zip(table["sample_id"].to_pylist(), table["value"].to_pylist(), strict=True)
        scores.setdefault(reference.folder.rsplit("/", 1)[-1], {}).update(values)
    return SampleScores(
        rated={row["sample_id"]: (row["reward"], row["advantage"]) for row in rows},
        dropped=frozenset(row["group_id"] for row in rows if row["dropped"]),
        scores=scores,
    )


def _sides(ranked: Sequence[Sequence[Row]], thoughts: SampleScores) -> dict[str, int]:
    """How large each image is shown: the ends of a group large, the others small."""
    sides: dict[str, int] = {}
    for group in ranked:
        names = [row["sample_id"] for row in group if _TEXT not in row]
        sides |= dict.fromkeys(names, SMALL)
        known = [row["sample_id"] for row in group if _TEXT not in row and thoughts.reward(row) is not None]
        sides |= dict.fromkeys([*known[:1], *known[-1:]] or names[:2], LARGE)
    return sides


def _read_images(files: Sequence[Path], sides: Mapping[str, int]) -> dict[str, Image.Image]:
    """The images of these samples, made smaller one row group at a time, so that few are in memory at full size."""
    found: dict[str, Image.Image] = {}
    for path in files if sides else ():
        file = pq.ParquetFile(path)
        for index in range(file.num_row_groups):
            names = file.read_row_group(index, columns=["sample_id"])["sample_id"].to_pylist()
            if sides.keys().isdisjoint(names):
                continue
            cells = file.read_row_group(index, columns=["image"])["image"].to_pylist()
            for name, cell in zip(names, cells, strict=True):
                if name in sides and cell is not None:
                    found[name] = shrunk(decode_stored(cell["bytes"], name), sides[name])
    return found


def _group(
    rows: Sequence[Row], thoughts: SampleScores, images: Mapping[str, Image.Image], targets: TargetReader
) -> GroupView:
    first = rows[0]
    return GroupView(
        group_id=first["group_id"],
        dataset=first["dataset"],
        prompt=first["prompt"],
        dropped=first["group_id"] in thoughts.dropped,
        target=targets.read(first.get("target_uri"), first.get("target_sha256")),
        samples=tuple(_sample(row, thoughts, images) for row in rows),
    )


def _sample(row: Row, thoughts: SampleScores, images: Mapping[str, Image.Image]) -> SampleView:
    name = row["sample_id"]
    trained = [value for value, kept in zip(row["rollout_logprobs"], row["loss_mask"], strict=True) if kept]
    reward, advantage = thoughts.rated.get(name, (None, None))
    return SampleView(
        sample_id=name,
        seed=row["seed"],
        logprob=math.fsum(trained),
        length=len(trained),
        finished=row["finished"],
        reward=reward,
        advantage=advantage,
        breakdown={label: values.get(name) for label, values in thoughts.scores.items()},
        output=row[_TEXT] if _TEXT in row else images.get(name),
    )
