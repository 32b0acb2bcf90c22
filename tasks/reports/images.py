"""Stored images by sample id, strips of thumbnails, and the contact sheet of before and after."""

import base64
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont

from grpo_core.rewards.image_files import decode_stored

PRUNED = "image removed"
"""Stands where an image was."""


def read_images(rollouts: Path, sample_ids: Sequence[str]) -> dict[str, Image.Image]:
    """The images of these samples, as far as none was pruned; only row groups that hold one of them are read."""
    wanted = set(sample_ids)
    found: dict[str, Image.Image] = {}
    for path in sorted(rollouts.glob("*.parquet")):
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            names = file.read_row_group(group, columns=["sample_id"])["sample_id"].to_pylist()
            if wanted.isdisjoint(names):
                continue
            cells = file.read_row_group(group, columns=["image"])["image"].to_pylist()
            for name, cell in zip(names, cells, strict=True):
                if name in wanted and cell is not None:
                    found[name] = decode_stored(cell["bytes"], name)
    return found


def fitted(image: Image.Image, side: int) -> Image.Image:
    """Scaled to fit a square; small images grow by whole pixels, large ones are averaged."""
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS)


def shrunk(image: Image.Image, side: int) -> Image.Image:
    """The image at most this many pixels a side, as it is where it is smaller."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    return small


def data_uri(content: bytes, kind: str) -> str:
    """Bytes as a link that a page can show without a server."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def thumbnail_uri(image: Image.Image, side: int) -> str:
    """A small image as a data link: PNG where that is small, JPEG for photographs."""
    small = fitted(image, side)
    png, jpeg = io.BytesIO(), io.BytesIO()
    small.save(png, "PNG")
    small.save(jpeg, "JPEG", quality=80)
    if png.tell() <= jpeg.tell():
        return data_uri(png.getvalue(), "image/png")
    return data_uri(jpeg.getvalue(), "image/jpeg")


@dataclass(frozen=True)
class SheetRow:
    """One held-out prompt of the contact sheet.

    Attributes:
        prompt: its text.
        target: what it ought to give, if known.
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
    """Held-out prompts down, target, before and after across; the same seeds on both sides."""
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
        lines.append(f"reward {row.reward_before:.3f} -> {row.reward_after:.3f}")
    return "\n".join(lines)
