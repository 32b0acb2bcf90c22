"""The held-out samples before and after training: a contact sheet of images, or a page of texts."""

import io
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from PIL import Image

from grpo_core.rollouts.messages import shown_prompt
from tasks.progress import log
from tasks.prompts.targets import TargetReference, load_target
from tasks.reports.groups import Row, read_shown_samples
from tasks.reports.images import PRUNED, THUMBNAIL, PromptImages, embedded, fitted
from tasks.reports.text import TRUNCATED, change, fenced, number
from tasks.runs.layout import CONTACT_SHEET, HELDOUT_TEXTS, ROLLOUTS, STATES, stage_folder
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

if TYPE_CHECKING:
    from tasks.reports.fonts import Fonts

SIDE, GAP, LABEL, HEAD, SMALL_LETTERS = 96, 6, 230, 52, 11
"""Pixels of the sheet: side of an image, between images, left of them and above them, and the size of its letters."""

MAX_SHEET_ROWS, MAX_SHEET_COLUMNS = 100, 16
"""Prompts of the sheet, and images of a prompt and of each side: 54 million pixels at most. Pillow, and with it
Prefect's page, opens no image of more than 179 million, and warns from 89 million on."""

_HELDOUT_COLUMNS = (
    *("sample_id", "group_id", "prompt", "sources"),
    *("target_uri", "target_sha256", "completion", "finished"),
)

Sides = tuple[Sequence[Row], Sequence[Row]]
"""The samples of one prompt before and after training; `image` is None where it was pruned, `source_images` are those
in the prompt."""


def write_contact_sheet(store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, title: str) -> str:
    """Write the images of two evaluations, named by their advantages, next to each other, and return the path."""
    buffer = io.BytesIO()
    pairs, total = _pairs(store, before, after, limit=MAX_SHEET_ROWS)
    if total > len(pairs):
        title = f"{title}, the first {len(pairs)} of {total}"
    contact_sheet(pairs, title=title).save(buffer, "PNG")
    store.write_file(CONTACT_SHEET, buffer.getvalue())
    return store.path(CONTACT_SHEET)


def write_heldout_texts(store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, title: str) -> str:
    """Write the complete texts of two evaluations, named by their advantages, as Markdown, and return the path."""
    pairs, _ = _pairs(store, before, after)
    everything = [[row for pair in pairs for row in pair[side]] for side in (0, 1)]
    lines = [f"# {title}", "", f"Mean reward {change(*map(_mean, everything))}; the same seeds.", ""]
    for index, pair in enumerate(pairs, start=1):
        lines += [
            f"## Prompt {index}: reward {change(*map(_mean, pair))}",
            "",
            fenced(shown_prompt(pair[0][0]["prompt"])),
            "",
        ]
        if images := pair[0][0]["source_images"]:
            lines += [" ".join(embedded("source", image) for image in images), ""]
        for name, rows in zip(("Before training", "After training"), pair, strict=True):
            for row in rows:
                cut = "" if row["finished"] else TRUNCATED
                lines += [f"{name}, reward {number(row['reward'])}{cut}", "", fenced(row["completion"]), ""]
    store.write_file(HELDOUT_TEXTS, "\n".join(lines).encode())
    return store.path(HELDOUT_TEXTS)


def _pairs(
    store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, *, limit: int | None = None
) -> tuple[list[Sides], int]:
    """Pair the samples of the first prompts, or all, of two evaluations; and return the number of all prompts."""
    groups, images_of = list[dict[str, Sequence[Row]]](), PromptImages(THUMBNAIL, store)
    with store.reading(without=(STATES,)) as read:
        for side in (before, after):
            rollouts = store.find(f"{stage_folder(side.folder)}/{ROLLOUTS}")
            assert rollouts is not None, "an evaluation keeps its rollouts"
            table = read_shown_samples(read, [rollouts], (), [side], _HELDOUT_COLUMNS)
            found = {group[0]["group_id"]: group for group in table.groups}
            shown = list(groups[0] if groups else found)[:limit]
            rows = [row for group_id in shown for row in found[group_id]]
            names = [] if table.is_text else [row["sample_id"] for row in rows]
            # In the size of the sheet: those of a hundred prompts in their own would take gigabytes.
            images = table.images(names, dict.fromkeys(names, SIDE))
            for row in rows:
                row["image"] = images.get(row["sample_id"])
                row["source_images"] = images_of.sources(row)
                row["target_uri"] = images_of.find(row["target_uri"]) if row.get("target_uri") else None
            groups.append({group_id: found[group_id] for group_id in shown})
    return [(earlier, groups[1][group_id]) for group_id, earlier in groups[0].items()], len(found)


def _mean(rows: Sequence[Row]) -> float | None:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return fmean(rewards) if rewards else None


def contact_sheet(pairs: Sequence[Sides], *, title: str, side: int = SIDE) -> Image.Image:
    """Lay out a row per held-out prompt: images, target, and the first MAX_SHEET_COLUMNS before and after."""
    # Matplotlib, whose fonts these are, takes a while to import.
    from tasks.reports.fonts import FONTS_HINT, fonts_for

    fonts = fonts_for([title, *(before[0]["prompt"] for before, _ in pairs)])
    if fonts.missing_scripts:
        log(f"{CONTACT_SHEET} has code points in place of letters of {fonts.missing_scripts}. {FONTS_HINT}")
    targets = any(before[0].get("target_uri") for before, _ in pairs)
    per_side = min(max(len(before) for before, _ in pairs), MAX_SHEET_COLUMNS)
    sources = min(max(len(before[0].get("source_images", ())) for before, _ in pairs), MAX_SHEET_COLUMNS)
    target_x = LABEL + (sources * (side + GAP) + 2 * GAP if sources else 0)
    before_x = target_x + (side + 3 * GAP if targets else 0)
    after_x = before_x + per_side * (side + GAP) + 3 * GAP
    after = "after training, same seeds"
    width = after_x + max(per_side * (side + GAP), fonts.width(after, SMALL_LETTERS)) + GAP
    sheet = Image.new("RGB", (width, HEAD + len(pairs) * (side + GAP) + GAP), "#eef0f3")
    fonts.draw(sheet, (10, 22), fonts.shown(title), 14, "#111111")
    headings = [(before_x, "before training"), (after_x, after)]
    headings += [(target_x, "target")] if targets else []
    headings += [(LABEL, "source")] if sources else []
    for x, heading in headings:
        fonts.draw(sheet, (x, 44), heading, SMALL_LETTERS, "#444444")
    for index, pair in enumerate(pairs):
        top, first = HEAD + index * (side + GAP), pair[0][0]
        for place, line in enumerate(_label(pair, fonts)):
            fonts.draw(sheet, (10, top + 14 + 15 * place), line, SMALL_LETTERS, "#111111")
        if first.get("target_uri"):
            target = load_target(TargetReference(first["target_uri"], first["target_sha256"]))
            sheet.paste(fitted(target, side), (target_x, top))
        for place, image in enumerate(first.get("source_images", ())[:sources]):
            sheet.paste(fitted(image, side), (LABEL + place * (side + GAP), top))
        for start, rows in zip((before_x, after_x), pair, strict=True):
            for place, row in enumerate(rows[:per_side]):
                left = start + place * (side + GAP)
                if row["image"] is None:
                    fonts.draw(sheet, (left + GAP, top + side // 2), PRUNED, SMALL_LETTERS, "#888888")
                else:
                    sheet.paste(fitted(row["image"], side), (left, top))
    return sheet


def _label(pair: Sides, fonts: "Fonts") -> list[str]:
    lines = fonts.lines(pair[0][0]["prompt"], SMALL_LETTERS, LABEL - 20, 5)
    before, after = map(_mean, pair)
    if before is not None and after is not None:
        lines.append(f"reward {number(before)} → {number(after)}")
    return lines
