"""The pictures of an iteration or an evaluation: each group with its best and worst sibling."""

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image, ImageOps

from grpo_core.errors import InputError
from tasks.input_files import read_input_file
from tasks.reports.artifact_reader import ArtifactReader
from tasks.storage.reference import ArtifactRef

LARGE, SMALL = 320, 96
"""Longest side in pixels of the best and worst picture, and of the other siblings; smaller ones stay as they are."""

_READ = ["sample_id", "group_id", "prompt", "target_uri", "target_sha256", "rollout_logprobs", "loss_mask", "seed"]


@dataclass(frozen=True)
class SampleView:
    """One picture and what was thought of it.

    Attributes:
        sample_id: joins every table.
        seed: that its tokens were sampled with.
        logprob: sum over its trained tokens, in nats, recorded while sampling.
        length: trained tokens.
        reward: None where no reward applies or none was computed.
        advantage: None likewise.
        breakdown: value by reward, before weights; None where the reward does not apply.
        image: RGB, made smaller where it was large.
    """

    sample_id: str
    seed: int
    logprob: float
    length: int
    reward: float | None
    advantage: float | None
    breakdown: Mapping[str, float | None]
    image: Image.Image


@dataclass(frozen=True)
class GroupView:
    """Siblings of one prompt occurrence.

    Attributes:
        group_id: of the occurrence.
        prompt: as it was given.
        target: the picture that it ought to give; None where there is none, or none can be read.
        samples: best reward first, those without one last; in the order drawn where rewards are equal.
    """

    group_id: str
    prompt: str
    target: Image.Image | None
    samples: tuple[SampleView, ...]

    @property
    def rated(self) -> tuple[SampleView, ...]:
        """The samples that have a reward."""
        return tuple(sample for sample in self.samples if sample.reward is not None)

    @property
    def best(self) -> SampleView | None:
        """Highest reward; None where nothing has one."""
        return next(iter(self.rated), None)

    @property
    def worst(self) -> SampleView | None:
        """Lowest reward; None with fewer than two rewards."""
        return self.rated[-1] if len(self.rated) > 1 else None

    @property
    def reward(self) -> float | None:
        """Mean over the samples that have one."""
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def spread(self) -> float | None:
        """Highest less lowest reward; None with fewer than two rewards."""
        if len(self.rated) < 2:
            return None
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        return max(rewards) - min(rewards)


@dataclass(frozen=True)
class Groups:
    """The first groups of a collection.

    Attributes:
        shown: these groups.
        total: groups that there are.
    """

    shown: tuple[GroupView, ...]
    total: int


class TargetReader:
    """Target pictures by address, each read once; one that is gone or changed is told and left out.

    Attributes:
        missing: addresses and reasons.
    """

    def __init__(self) -> None:
        """Nothing is read yet."""
        self.missing: dict[str, str] = {}
        self._read: dict[str, Image.Image] = {}

    def read(self, uri: str | None, sha256: str | None) -> Image.Image | None:
        """The picture, made smaller where it is large."""
        if uri is None or uri in self.missing:
            return None
        if uri not in self._read:
            try:
                content = read_input_file(uri, place="target")
                if hashlib.sha256(content).hexdigest() != sha256:
                    raise ValueError("it is not the file that the run was trained with")
                self._read[uri] = _small(_over_white(Image.open(io.BytesIO(content))), LARGE)
            except InputError as error:
                self.missing[uri] = error.mend
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                self.missing[uri] = str(error)
        return self._read.get(uri)


def read_groups(
    reader: ArtifactReader, stages: Mapping[str, ArtifactRef], fetched: Path, targets: TargetReader, *, limit: int
) -> Groups:
    """Groups in the order drawn, as far as their stages are there; none without rollouts.

    Args:
        reader: of the run.
        stages: whole artifacts; rewards and advantages may be missing.
        fetched: folder for copies of remote artifacts.
        targets: reads the targets.
        limit: most groups that are read.
    """
    if "rollouts" not in stages:
        return Groups((), 0)
    folder = reader.local_folder(stages["rollouts"], fetched)
    files = sorted(folder.glob("*.parquet"))
    rows = [row for path in files for row in pq.ParquetFile(path).read(columns=_READ).to_pylist()]
    by_group: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        by_group.setdefault(row["group_id"], []).append(row)
    kept = list(by_group.values())[:limit]
    scores = _read_breakdown(reader, stages, fetched)
    rated = _read_rated(reader, stages, fetched)
    ranked = [sorted(group, key=lambda row: _rank(rated, row)) for group in kept]
    images = _read_images(files, _sides(ranked, rated))
    shown = tuple(_group(group, rated, scores, images, targets) for group in ranked)
    return Groups(shown, len(by_group))


Rated = Mapping[str, tuple[float | None, float | None]]


def _rank(rated: Rated, row: Mapping[str, object]) -> float:
    reward = rated.get(str(row["sample_id"]), (None, None))[0]
    return math.inf if reward is None else -reward


def _read_rated(reader: ArtifactReader, stages: Mapping[str, ArtifactRef], fetched: Path) -> Rated:
    if "advantages" not in stages:
        return {}
    folder = reader.local_folder(stages["advantages"], fetched)
    table = pq.ParquetFile(folder / "advantages.parquet").read(columns=["sample_id", "reward", "advantage"])
    return {row["sample_id"]: (row["reward"], row["advantage"]) for row in table.to_pylist()}


def _read_breakdown(
    reader: ArtifactReader, stages: Mapping[str, ArtifactRef], fetched: Path
) -> Mapping[str, Mapping[str, float | None]]:
    if "rewards" not in stages:
        return {}
    folder = reader.local_folder(stages["rewards"], fetched)
    tables = {
        path.stem: pq.ParquetFile(path).read(columns=["sample_id", "value"])
        for path in sorted(folder.glob("*.parquet"))
    }
    return {
        label: dict(zip(table["sample_id"].to_pylist(), table["value"].to_pylist(), strict=True))
        for label, table in tables.items()
    }


def _sides(ranked: Sequence[Sequence[Mapping[str, object]]], rated: Rated) -> dict[str, int]:
    """How large each picture is shown: the ends of a group large, the others small."""
    sides: dict[str, int] = {}
    for group in ranked:
        names = [str(row["sample_id"]) for row in group]
        sides |= dict.fromkeys(names, SMALL)
        known = [name for name in names if rated.get(name, (None, None))[0] is not None]
        sides |= dict.fromkeys([*known[:1], *known[-1:]] or names[:2], LARGE)
    return sides


def _read_images(files: Sequence[Path], sides: Mapping[str, int]) -> dict[str, Image.Image]:
    """The pictures of these samples, made smaller one row group at a time, so that few are in memory at full size."""
    found: dict[str, Image.Image] = {}
    for path in files:
        file = pq.ParquetFile(path)
        for index in range(file.num_row_groups):
            names = file.read_row_group(index, columns=["sample_id"])["sample_id"].to_pylist()
            if sides.keys().isdisjoint(names):
                continue
            cells = file.read_row_group(index, columns=["image"])["image"].to_pylist()
            for name, cell in zip(names, cells, strict=True):
                if name in sides:
                    found[name] = _small(Image.open(io.BytesIO(cell["bytes"])).convert("RGB"), sides[name])
    return found


def _small(image: Image.Image, side: int) -> Image.Image:
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


def _over_white(image: Image.Image) -> Image.Image:
    upright = ImageOps.exif_transpose(image)
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    clear = upright.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")


def _group(
    rows: Sequence[Mapping[str, object]],
    rated: Rated,
    scores: Mapping[str, Mapping[str, float | None]],
    images: Mapping[str, Image.Image],
    targets: TargetReader,
) -> GroupView:
    first = rows[0]
    uri, sha256 = first["target_uri"], first["target_sha256"]
    return GroupView(
        group_id=str(first["group_id"]),
        prompt=str(first["prompt"]),
        target=targets.read(None if uri is None else str(uri), None if sha256 is None else str(sha256)),
        samples=tuple(_sample(row, rated, scores, images) for row in rows),
    )


def _sample(
    row: Mapping[str, object],
    rated: Rated,
    scores: Mapping[str, Mapping[str, float | None]],
    images: Mapping[str, Image.Image],
) -> SampleView:
    name = str(row["sample_id"])
    logprobs, mask = row["rollout_logprobs"], row["loss_mask"]
    assert isinstance(logprobs, list), "the schema says lists"
    assert isinstance(mask, list), "the schema says lists"
    trained = [value for value, kept in zip(logprobs, mask, strict=True) if kept]
    reward, advantage = rated.get(name, (None, None))
    return SampleView(
        sample_id=name,
        seed=int(str(row["seed"])),
        logprob=math.fsum(trained),
        length=len(trained),
        reward=reward,
        advantage=advantage,
        breakdown={label: values.get(name) for label, values in scores.items()},
        image=images[name],
    )
