"""Stored images by sample id, images as data links, and the contact sheet of held-out prompts."""

import base64
import io
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

from grpo_core.rewards.images import decode_stored
from tasks.reports.text import number

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
    for path in sorted(rollouts.glob("*.parquet")) if sample_ids else ():
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


@dataclass(frozen=True)
class SheetRow:
    """One held-out prompt of the contact sheet.

    Attributes:
        prompt: text of the prompt.
        target: target image, if known.
        before: images of the first policy; None for one that was pruned.
        after: images of the last policy, with the same seeds.
        reward_before: mean over `before`; None without one.
        reward_after: mean over `after`.
    """

    prompt: str
    target: Image.Image | None
    before: Sequence[Image.Image | None]
    after: Sequence[Image.Image | None]
    reward_before: float | None
    reward_after: float | None


def contact_sheet(rows: Sequence[SheetRow], *, title: str, side: int = 96) -> Image.Image:
    """Lay out one row per held-out prompt: target, images before and images after, `side` pixels each."""
    font, small = ImageFont.load_default(15), ImageFont.load_default(12)
    gap, label, head = 6, 230, 52
    per_side = max(len(row.before) for row in rows)
    target_x = label
    before_x = target_x + (side + 3 * gap if any(row.target for row in rows) else 0)
    after_x = before_x + per_side * (side + gap) + 3 * gap
    size = (after_x + per_side * (side + gap) + gap, head + len(rows) * (side + gap) + gap)
    sheet = Image.new("RGB", size, "#eef0f3")
    draw = ImageDraw.Draw(sheet)
    draw.text((10, 8), title, fill="#111111", font=font)
    if before_x > target_x:
        draw.text((target_x, 32), "target", fill="#444444", font=small)
    draw.text((before_x, 32), "before training", fill="#444444", font=small)
    draw.text((after_x, 32), "after training, same seeds", fill="#444444", font=small)
    for index, row in enumerate(rows):
        top = head + index * (side + gap)
        draw.multiline_text((10, top + 4), _label(row), fill="#111111", font=small, spacing=3)
        if row.target is not None:
            sheet.paste(fitted(row.target, side), (target_x, top))
        for x, images in ((before_x, row.before), (after_x, row.after)):
            for place, image in enumerate(images):
                left = x + place * (side + gap)
                if image is None:
                    draw.text((left + gap, top + side // 2), PRUNED, fill="#888888", font=small)
                else:
                    sheet.paste(fitted(image, side), (left, top))
    return sheet


def _label(row: SheetRow) -> str:
    lines = textwrap.wrap(row.prompt, 33, max_lines=4, placeholder=" ...")
    if row.reward_before is not None and row.reward_after is not None:
        lines.append(f"reward {number(row.reward_before)} -> {number(row.reward_after)}")
    return "\n".join(lines)
