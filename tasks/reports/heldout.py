"""The held-out prompts before and after training, kept with the run: a sheet of images, or a page of texts."""

import io
import textwrap
from collections.abc import Iterator, Sequence
from statistics import fmean

from PIL import Image, ImageDraw, ImageFont

from tasks.prompts.targets import TargetReference, load_target
from tasks.reports.images import PRUNED, fitted
from tasks.reports.samples import Row, read_samples
from tasks.reports.text import change, fenced, number
from tasks.runs.layout import CONTACT_SHEET, HELDOUT_TEXTS, ROLLOUTS, STATES, stage_folder
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

GAP, LABEL, HEAD = 6, 230, 52
"""Pixels of the sheet between images, left of them and above them."""

_COLUMNS = ("sample_id", "group_id", "prompt", "target_uri", "target_sha256", "completion")

Sides = tuple[Sequence[Row], Sequence[Row]]
"""The samples of one prompt before and after training; `image` is None where it was pruned."""


def write_contact_sheet(store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, title: str) -> str:
    """Write the images of two evaluations, named by their advantages, next to each other, and return the path."""
    buffer = io.BytesIO()
    contact_sheet(list(_pairs(store, before, after)), title=title).save(buffer, "PNG")
    store.write_file(CONTACT_SHEET, buffer.getvalue())
    return store.path(CONTACT_SHEET)


def write_heldout_texts(store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, title: str) -> str:
    """Write the complete texts of two evaluations, named by their advantages, as Markdown, and return the path."""
    pairs = list(_pairs(store, before, after))
    everything = [[row for pair in pairs for row in pair[side]] for side in (0, 1)]
    lines = [f"# {title}", "", f"Mean reward {change(*map(_mean, everything))}; the same seeds.", ""]
    for index, pair in enumerate(pairs, start=1):
        lines += [f"## Prompt {index}: reward {change(*map(_mean, pair))}", "", fenced(pair[0][0]["prompt"]), ""]
        for name, rows in zip(("Before training", "After training"), pair, strict=True):
            for row in rows:
                lines += [f"{name}, reward {number(row['reward'])}", "", fenced(row["completion"]), ""]
    store.write_file(HELDOUT_TEXTS, "\n".join(lines).encode())
    return store.path(HELDOUT_TEXTS)


def _pairs(store: ArtifactStore, before: ArtifactRef, after: ArtifactRef) -> Iterator[Sides]:
    """Read two evaluations, and pair the samples of each prompt by their group id."""
    groups = []
    with store.reading(without=(STATES,)) as read:
        for side in (before, after):
            rollouts = store.find(f"{stage_folder(side.folder)}/{ROLLOUTS}")
            assert rollouts is not None, "an evaluation keeps its rollouts"
            table = read_samples(read, [rollouts], (), [side], _COLUMNS)
            images = {} if table.is_text else table.images([row["sample_id"] for row in table.rows])
            for row in table.rows:
                row["image"] = images.get(row["sample_id"])
            groups.append({group[0]["group_id"]: group for group in table.groups})
    for group_id, earlier in groups[0].items():
        yield earlier, groups[1][group_id]


def _mean(rows: Sequence[Row]) -> float | None:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return fmean(rewards) if rewards else None


def contact_sheet(pairs: Sequence[Sides], *, title: str, side: int = 96) -> Image.Image:
    """Lay out one row per held-out prompt: target, images before and images after, `side` pixels each."""
    font, small = ImageFont.load_default(15), ImageFont.load_default(12)
    targets = any(before[0].get("target_uri") for before, _ in pairs)
    per_side = max(len(before) for before, _ in pairs)
    before_x = LABEL + (side + 3 * GAP if targets else 0)
    after_x = before_x + per_side * (side + GAP) + 3 * GAP
    sheet = Image.new(
        "RGB", (after_x + per_side * (side + GAP) + GAP, HEAD + len(pairs) * (side + GAP) + GAP), "#eef0f3"
    )
    draw = ImageDraw.Draw(sheet)
    draw.text((10, 8), title, fill="#111111", font=font)
    for x, heading in ((before_x, "before training"), (after_x, "after training, same seeds")):
        draw.text((x, 32), heading, fill="#444444", font=small)
    if targets:
        draw.text((LABEL, 32), "target", fill="#444444", font=small)
    for index, pair in enumerate(pairs):
        top, first = HEAD + index * (side + GAP), pair[0][0]
        draw.multiline_text((10, top + 4), _label(pair), fill="#111111", font=small, spacing=3)
        if first.get("target_uri"):
            target = load_target(TargetReference(first["target_uri"], first["target_sha256"]))
            sheet.paste(fitted(target, side), (LABEL, top))
        for start, rows in zip((before_x, after_x), pair, strict=True):
            for place, row in enumerate(rows):
                left = start + place * (side + GAP)
                if row["image"] is None:
                    draw.text((left + GAP, top + side // 2), PRUNED, fill="#888888", font=small)
                else:
                    sheet.paste(fitted(row["image"], side), (left, top))
    return sheet


def _label(pair: Sides) -> str:
    lines = textwrap.wrap(pair[0][0]["prompt"], 33, max_lines=4, placeholder=" ...")
    before, after = map(_mean, pair)
    if before is not None and after is not None:
        lines.append(f"reward {number(before)} -> {number(after)}")
    return "\n".join(lines)
