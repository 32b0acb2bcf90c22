"""The held-out prompts before and after training, kept beside the run: a sheet of images, or a page of texts."""

import io
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tasks.prompts.targets import TargetReference, load_target
from tasks.reports.images import SheetRow, contact_sheet, read_images
from tasks.reports.passages import fenced
from tasks.runs.layout import ADVANTAGES_FILE, CONTACT_SHEET, HELDOUT_TEXTS, ROLLOUTS, stage_folder
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore


def write_contact_sheet(store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, title: str) -> str:
    """Draw the images of two evaluations side by side; where the sheet is.

    Args:
        store: of the run.
        before: advantages of the earlier evaluation.
        after: of the later one.
        title: stands at the top.
    """
    with tempfile.TemporaryDirectory() as fetched:
        columns = ["target_uri", "target_sha256"]
        sides = [_read_side(store, side, Path(fetched) / side.folder, columns) for side in (before, after)]
        images = [read_images(side.rollouts, side.table["sample_id"].to_list()) for side in sides]
    rows = []
    for earlier, later in _pairs(sides[0].table, sides[1].table):
        first = earlier.row(0, named=True)
        target = TargetReference(first["target_uri"], first["target_sha256"]) if first["target_uri"] else None
        row = SheetRow(
            prompt=first["prompt"],
            target=load_target(target) if target else None,
            before=[images[0].get(sample) for sample in earlier["sample_id"]],
            after=[images[1].get(sample) for sample in later["sample_id"]],
            reward_before=_mean(earlier["reward"]),
            reward_after=_mean(later["reward"]),
        )
        rows.append(row)
    buffer = io.BytesIO()
    contact_sheet(rows, title=title).save(buffer, "PNG")
    store.write_file(CONTACT_SHEET, buffer.getvalue())
    return store.path(CONTACT_SHEET)


def write_heldout_texts(store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, title: str) -> str:
    """Write the texts of two evaluations one below the other, whole, as Markdown; where the page is.

    Args:
        store: of the run.
        before: advantages of the earlier evaluation.
        after: of the later one.
        title: stands at the top; plain words.
    """
    with tempfile.TemporaryDirectory() as fetched:
        sides = [_read_side(store, side, Path(fetched) / side.folder, ["completion"]) for side in (before, after)]
    earlier, later = (side.table for side in sides)
    lines = [f"# {title}", "", f"Mean reward {_change(earlier['reward'], later['reward'])}; the same seeds.", ""]
    for number, (first, last) in enumerate(_pairs(earlier, later), start=1):
        prompt = first.row(0, named=True)["prompt"]
        lines += [f"## Prompt {number}: reward {_change(first['reward'], last['reward'])}", "", fenced(prompt), ""]
        for name, table in (("Before training", first), ("After training", last)):
            for row in table.iter_rows(named=True):
                lines += [f"{name}, reward {_number(row['reward'])}", "", fenced(row["completion"]), ""]
    store.write_file(HELDOUT_TEXTS, "\n".join(lines).encode())
    return store.path(HELDOUT_TEXTS)


@dataclass(frozen=True)
class _Side:
    """One evaluation.

    Attributes:
        table: sample_id, group_id, prompt, what was asked for, and reward; in the order drawn.
        rollouts: folder on this machine.
    """

    table: pl.DataFrame
    rollouts: Path


def _read_side(store: ArtifactStore, advantages: ArtifactRef, fetched: Path, columns: Sequence[str]) -> _Side:
    reference = store.find(f"{stage_folder(advantages.folder)}/{ROLLOUTS}")
    assert reference is not None, "an evaluation keeps its rollouts"
    rollouts = store.local_files(reference, fetched / "rollouts")
    scored = store.local_files(advantages, fetched / "advantages")
    names = ["sample_id", "group_id", "prompt", *columns]
    table = pl.read_parquet(sorted(rollouts.glob("*.parquet")), columns=names).join(
        pl.read_parquet(scored / ADVANTAGES_FILE, columns=["sample_id", "reward"]),
        on="sample_id",
        maintain_order="left",
    )
    return _Side(table, rollouts)


def _pairs(before: pl.DataFrame, after: pl.DataFrame) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
    """A prompt's samples before and after, by the name of their group."""
    for (group_id,), group in before.group_by("group_id", maintain_order=True):
        yield group, after.filter(pl.col("group_id") == group_id)


def _mean(rewards: pl.Series) -> float | None:
    value = rewards.mean()
    return float(value) if isinstance(value, int | float) else None


def _change(before: pl.Series, after: pl.Series) -> str:
    first, last = _mean(before), _mean(after)
    if first is None or last is None:
        return f"{_number(first)} -> {_number(last)}"
    return f"{first:.3f} -> {last:.3f} ({last - first:+.3f})"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
