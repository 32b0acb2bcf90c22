"""Images of reports: stored ones by sample id, targets of prompts, and images as data links."""

import base64
import io
from collections.abc import Collection, Mapping
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image

from grpo_core.errors import InputError
from grpo_core.images import decode_stored
from tasks.prompts.targets import TargetReference, load_target
from tasks.runs.layout import IMAGES

PRUNED = "image removed"
"""Shown in place of an image that `grpo prune` deleted."""

LOSSLESS_SIDE = 128
"""Images up to this many pixels per side are embedded without loss, because each of their pixels matters."""


def read_images(
    rollouts: Path, sample_ids: Collection[str], sides: Mapping[str, int] | None = None
) -> dict[str, Image.Image]:
    """Read the images of these samples; only row groups with one of them are read, one at a time.

    Args:
        rollouts: folder of the Parquet files.
        sample_ids: the wanted samples; one whose image was pruned is left out of the result.
        sides: longest side by sample, in pixels, to which an image is reduced at once; None keeps every size.
    """
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


class TargetReader:
    """Target images by address, each read once; missing and changed ones are recorded and left out.

    Attributes:
        missing: addresses and reasons.
    """

    def __init__(self, side: int) -> None:
        """Reduce images to at most `side` pixels; nothing is read yet."""
        self.missing: dict[str, str] = {}
        self._side = side
        self._read: dict[str, Image.Image] = {}

    def read(self, uri: str | None, sha256: str | None) -> Image.Image | None:
        """Read the image, reduced where it is large; None where it cannot be read."""
        if uri is None or sha256 is None or uri in self.missing:
            return None
        if uri not in self._read:
            try:
                self._read[uri] = shrunk(load_target(TargetReference(uri, sha256)), self._side)
            except InputError as error:
                self.missing[uri] = error.hint
        return self._read.get(uri)


def fitted(image: Image.Image, side: int) -> Image.Image:
    """Scale an image to fit a square of `side` pixels: small ones by an integer factor, large ones by averaging."""
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS)


def shrunk(image: Image.Image, side: int) -> Image.Image:
    """Copy an image, reduced to at most `side` pixels per side."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    return small


def data_uri(content: bytes, kind: str) -> str:
    """Encode bytes of a media type as a link that a page can show without a server."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_uri(image: Image.Image, *, lossless_side: int = LOSSLESS_SIDE, quality: int = 88) -> str:
    """Encode an image as a data link: PNG up to `lossless_side` pixels and where that is smaller, else JPEG."""
    png, jpeg = io.BytesIO(), io.BytesIO()
    image.save(png, "PNG", optimize=True)
    if max(image.size) > lossless_side:
        image.save(jpeg, "JPEG", quality=quality)
        if jpeg.tell() < png.tell():
            return data_uri(jpeg.getvalue(), "image/jpeg")
    return data_uri(png.getvalue(), "image/png")
