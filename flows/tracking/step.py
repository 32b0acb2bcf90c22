"""What trackers get of one iteration: its metrics, and images of the evaluation, read from the run's artifacts."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tasks.metrics.names import GUARDRAILS, HELDOUT
from tasks.reports.iteration import IterationRecord
from tasks.reports.samples import Row, read_samples, verified
from tasks.reports.text import one_line
from tasks.runs.layout import ROLLOUTS, stage_folder
from tasks.storage.artifacts.reference import ArtifactRef, PrunedArtifactError
from tasks.storage.artifacts.store import ArtifactStore

MAX_PROMPTS, MAX_SAMPLES, MAX_SIDE = 16, 4, 512
"""Held-out prompts and samples of each that are logged, and the longest side of an image in pixels."""

TITLE_LETTERS = 60

_COLUMNS = ("sample_id", "group_id", "prompt", "completion", "width", "height")


@dataclass(frozen=True)
class Step:
    """One iteration as trackers see it.

    Attributes:
        number: iterations done; 0 is the policy before training.
        metrics: as in metrics.parquet; before training the held-out ones alone.
        images: the first samples of held-out prompts by `heldout/NN PROMPT`, the same at every evaluation, of the
            policy that the iteration made; empty for texts, without an evaluation and where they were pruned.
    """

    number: int
    metrics: Mapping[str, float]
    images: Mapping[str, Sequence[Image.Image]]


def read_step(
    store: ArtifactStore,
    number: int,
    record: IterationRecord | None,
    heldout: ArtifactRef | None,
    guardrails: Mapping[str, ArtifactRef],
) -> Step:
    """Read what is logged of an iteration.

    Args:
        record: None before training.
        heldout: advantages of the evaluation of the policy that it made; None without one.
        guardrails: scores of the same evaluation by label.
    """
    images = _images(store, heldout)
    if record is not None:
        return Step(number, record.metrics, images)
    metrics = {HELDOUT: heldout.metrics["reward"]} if heldout and "reward" in heldout.metrics else {}
    for label, scores in guardrails.items():
        if (name := f"rewards/{label}/mean") in scores.metrics:
            metrics[f"{GUARDRAILS}{label}"] = scores.metrics[name]
    return Step(number, metrics, images)


def _images(store: ArtifactStore, advantages: ArtifactRef | None) -> Mapping[str, Sequence[Image.Image]]:
    rollouts = None if advantages is None else store.find(f"{stage_folder(advantages.folder)}/{ROLLOUTS}")
    if advantages is None or rollouts is None:
        return {}
    with tempfile.TemporaryDirectory() as fetched:
        try:
            table = read_samples(verified(store, Path(fetched)), [rollouts], (), [advantages], _COLUMNS)
        except PrunedArtifactError:
            return {}
        groups = [] if table.is_text else [group[:MAX_SAMPLES] for group in table.groups[:MAX_PROMPTS]]
        names = [row["sample_id"] for group in groups for row in group]
        found = table.images(names, dict.fromkeys(names, MAX_SIDE))
    shown = {
        _title(index, group[0]): [found[row["sample_id"]] for row in group if row["sample_id"] in found]
        for index, group in enumerate(groups, start=1)
    }
    return {title: images for title, images in shown.items() if images}


def _title(index: int, row: Row) -> str:
    # A slash would begin a group of its own.
    return f"heldout/{index:02d} {one_line(row['prompt'], TITLE_LETTERS).replace('/', ' ')}"
