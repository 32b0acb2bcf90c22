"""Images of reports: stored ones by sample id, targets and images of prompts, and images as data links."""

import base64
import contextlib
import io
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from grpo_core.errors import InputError
from grpo_core.rollouts.images import decode_stored
from tasks.prompts.targets import TargetReference, find_target, load_target
from tasks.reports.text import counted
from tasks.runs.layout import IMAGES, source_file
from tasks.runs.sources import read_sources
from tasks.storage.artifacts.store import ArtifactStore

PRUNED = "image removed"  # shown in place of an image that `grpo prune` deleted
THUMBNAIL = 112  # longest side of an image in Markdown, in pixels
LOSSLESS_SIDE = 128  # images up to this many pixels per side are embedded without loss: each pixel matters

_NOWHERE = (
    "It is neither in the working directory nor beside the storage root, nor in a folder of targets with which you "
    "have trained this run; nothing else is read or fetched for a table. Start `grpo` where the run was started."
)


def read_images(
    rollouts: Path, sample_ids: Collection[str], sides: Mapping[str, int] | None = None
) -> dict[str, Image.Image]:
    """Read the images of these samples, reduced to these sides at once; only row groups with one are read."""
    found: dict[str, Image.Image] = {}
    for path in sorted(rollouts.glob(IMAGES)) if sample_ids else ():
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            names = file.read_row_group(group, columns=["sample_id"])["sample_id"].to_pylist()
            if set(sample_ids).isdisjoint(names):
                continue
            cells = file.read_row_group(group, columns=["image"])["image"].to_pylist()
            for name, cell in zip(names, cells, strict=True):
                if name in sample_ids and cell is not None:
                    image = decode_stored(cell["bytes"], name)
                    found[name] = image if sides is None else shrunk(image, sides[name])
    return found


class PromptImages:
    """What prompts have besides their text: target images by address, and the images in them by digest.

    Each is read once, those in prompts from `stores`, and reduced to `side` pixels. `missing` and `missing_sources`
    have the reasons for those that cannot be read, which are left out.
    """

    def __init__(self, side: int, *stores: ArtifactStore) -> None:
        self.missing: dict[str, str] = {}
        self.missing_sources: dict[str, str] = {}
        self._side, self._stores = side, stores
        self._targets: dict[str, Image.Image] = {}
        self._sources: dict[str, Image.Image] = {}

    def target(self, uri: str | None, sha256: str | None) -> Image.Image | None:
        """Read the target image, reduced where it is large; None where it cannot be read."""
        if uri is None or sha256 is None or uri in self.missing:
            return None
        if uri not in self._targets:
            path = self.find(uri)
            try:
                if path is not None:
                    self._targets[uri] = shrunk(load_target(TargetReference(path, sha256)), self._side)
                else:
                    self.missing[uri] = _NOWHERE
            except InputError as error:
                self.missing[uri] = error.hint
        return self._targets.get(uri)

    def find(self, uri: str) -> str | None:
        """Return where a target image is that may be read; None if it is nowhere, or somewhere else."""
        return find_target(uri, self._stores) or find_target(uri, self._stores, self._folders)

    @cached_property
    def _folders(self) -> tuple[str, ...]:
        """The folders of targets with which this person has trained the runs, or to which they have agreed."""
        # Few rows need them, and the configuration takes longer to import than a table to read.
        from tasks.runs.stored import stored_config
        from tasks.runs.trust import known_target_folders

        found: list[str] = []
        for store in self._stores:
            with contextlib.suppress(InputError):
                found += known_target_folders(stored_config(store))
        return tuple(found)

    def sources(self, row: Mapping[str, Any]) -> list[Image.Image]:
        """Read the images in the prompt of a stored sample, reduced where they are large."""
        digests = row.get("sources") or ()
        for digest in digests:
            if digest not in self._sources and digest not in self.missing_sources:
                self._read_source(digest, str(row.get("sample_id")))
        return [self._sources[digest] for digest in digests if digest in self._sources]

    def warnings(self) -> list[str]:
        """Say which images could not be read: how many, and the first of them with the reason."""
        found = []
        if self.missing_sources:
            digest, reason = next(iter(self.missing_sources.items()))
            count = counted(len(self.missing_sources), "image")
            found.append(f"{count} of prompts cannot be shown, the first {source_file(digest)}: {reason}")
        if self.missing:
            uri, reason = next(iter(self.missing.items()))
            count = counted(len(self.missing), "target image")
            found.append(f"{count} cannot be shown, the first {uri}: {reason}")
        return found

    def _read_source(self, digest: str, sample_id: str) -> None:
        reason = "It is of no run that is shown."
        for store in self._stores:
            try:
                image = read_sources(store, {digest: f"sample {sample_id}"})[digest].open()
            except InputError as error:
                reason = error.hint
                continue
            self._sources[digest] = shrunk(image, self._side)
            return
        self.missing_sources[digest] = reason


def fitted(image: Image.Image, side: int) -> Image.Image:
    """Scale an image to fit a square of `side` pixels: small ones by an integer factor, large ones by averaging."""
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS)


def padded(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale an image to fit a size, and centre it on white of that size."""
    placed = Image.new("RGB", size, "white")
    scale = min(size[0] / image.width, size[1] / image.height)
    small = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    placed.paste(small, ((size[0] - small.width) // 2, (size[1] - small.height) // 2))
    return placed


def shrunk(image: Image.Image, side: int) -> Image.Image:
    """Copy an image, reduced to at most `side` pixels per side."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    return small


def data_uri(content: bytes, kind: str) -> str:
    """Encode bytes of a media type as a link that a page can show without a server."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_uri(image: Image.Image, *, lossless_side: int = LOSSLESS_SIDE, quality: int = 82) -> str:
    """Encode an image as a data link: as WebP, without loss up to `lossless_side` pixels per side."""
    content = io.BytesIO()
    lossless = max(image.size) <= lossless_side
    image.save(content, "WEBP", lossless=lossless, quality=20 if lossless else quality, method=2, exact=True)
    return data_uri(content.getvalue(), "image/webp")


def embedded(name: str, image: Image.Image) -> str:
    """Write a small image into Markdown."""
    return f"![{name}]({image_uri(fitted(image, THUMBNAIL), lossless_side=0, quality=80)})"
