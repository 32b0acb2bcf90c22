"""The held-out prompts before and after training, kept with the run: a sheet of images, or a page of texts."""

import io
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from tasks.prompts.targets import TargetReference, load_target
from tasks.reports.images import SheetRow, contact_sheet, read_images
from tasks.reports.samples import Row, SampleTable, read_samples
from tasks.reports.text import change, fenced, number
from tasks.runs.layout import CONTACT_SHEET, HELDOUT_TEXTS, ROLLOUTS, stage_folder
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

_COLUMNS = ("sample_id", "group_id", "prompt", "target_uri", "target_sha256", "completion")


def write_contact_sheet(store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, title: str) -> str:
    """Write the images of two evaluations next to each other as one image, and return its path.

    Args:
        store: the run.
        before: advantages of the earlier evaluation.
        after: advantages of the later evaluation.
        title: title at the top.
    """
    rows = []
    with tempfile.TemporaryDirectory() as fetched:
        earlier, later = (_read_evaluation(store, side, Path(fetched) / side.folder) for side in (before, after))
        images = [
            read_images(rollouts, [row["sample_id"] for row in table.rows]) for table, rollouts in (earlier, later)
        ]
    for first, last in _pairs(earlier[0], later[0]):
        row = first[0]
        target = TargetReference(row["target_uri"], row["target_sha256"]) if row["target_uri"] else None
        rows.append(
            SheetRow(
                prompt=row["prompt"],
                target=load_target(target) if target else None,
                before=[images[0].get(each["sample_id"]) for each in first],
                after=[images[1].get(each["sample_id"]) for each in last],
                reward_before=_mean(first),
                reward_after=_mean(last),
            )
        )
    buffer = io.BytesIO()
    contact_sheet(rows, title=title).save(buffer, "PNG")
    store.write_file(CONTACT_SHEET, buffer.getvalue())
    return store.path(CONTACT_SHEET)


def write_heldout_texts(store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, title: str) -> str:
    """Write the complete texts of two evaluations one below the other as Markdown, and return the path of the page.

    Args:
        store: the run.
        before: advantages of the earlier evaluation.
        after: advantages of the later evaluation.
        title: title at the top, without markup.
    """
    with tempfile.TemporaryDirectory() as fetched:
        earlier, later = (_read_evaluation(store, side, Path(fetched) / side.folder)[0] for side in (before, after))
    lines = [f"# {title}", "", f"Mean reward {_change(earlier.rows, later.rows)}; the same seeds.", ""]
    for index, (first, last) in enumerate(_pairs(earlier, later), start=1):
        lines += [f"## Prompt {index}: reward {_change(first, last)}", "", fenced(first[0]["prompt"]), ""]
        for name, table in (("Before training", first), ("After training", last)):
            for row in table:
                lines += [f"{name}, reward {number(row['reward'])}", "", fenced(row["completion"]), ""]
    store.write_file(HELDOUT_TEXTS, "\n".join(lines).encode())
    return store.path(HELDOUT_TEXTS)


def _read_evaluation(store: ArtifactStore, advantages: ArtifactRef, fetched: Path) -> tuple[SampleTable, Path]:
    """Read an evaluation's samples with their rewards; also the folder of its rollouts on this machine."""
    reference = store.find(f"{stage_folder(advantages.folder)}/{ROLLOUTS}")
    assert reference is not None, "an evaluation keeps its rollouts"
    rollouts = store.local_files(reference, fetched / "rollouts")
    scored = store.local_files(advantages, fetched / "advantages")
    return read_samples([rollouts], (), [scored], _COLUMNS), rollouts


def _pairs(before: SampleTable, after: SampleTable) -> Iterator[tuple[list[Row], list[Row]]]:
    """Pair the samples of each prompt before and after by their group id."""
    later = {group[0]["group_id"]: group for group in after.groups}
    for group in before.groups:
        yield group, later[group[0]["group_id"]]


def _mean(rows: Sequence[Row]) -> float | None:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return fmean(rewards) if rewards else None


def _change(before: Sequence[Row], after: Sequence[Row]) -> str:
    return change(_mean(before), _mean(after))
