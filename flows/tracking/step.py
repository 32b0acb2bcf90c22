"""What trackers get of one iteration: its metrics, and images of the evaluation, read from the run's artifacts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from tasks.reports.iteration import IterationRecord
from tasks.reports.samples import Row, read_samples
from tasks.reports.text import one_line
from tasks.runs.layout import ADVANTAGES, ROLLOUTS, STATES
from tasks.runs.metrics_table import evaluation_metrics
from tasks.runs.run_view import EvaluationView
from tasks.storage.artifacts.reference import PrunedArtifactError
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
    evaluation: EvaluationView | None,
) -> Step:
    """Read what is logged of an iteration.

    Args:
        record: None before training.
        evaluation: that of the policy that it made; None without one.
    """
    images = {} if evaluation is None else _images(store, evaluation)
    if record is not None:
        return Step(number, record.metrics, images)
    return Step(number, {} if evaluation is None else evaluation_metrics(evaluation), images)


def _images(store: ArtifactStore, evaluation: EvaluationView) -> Mapping[str, Sequence[Image.Image]]:
    with store.reading(without=(STATES,)) as read:
        try:
            table = read_samples(
                read,
                evaluation.stages[ROLLOUTS],
                (),
                evaluation.stages[ADVANTAGES],
                _COLUMNS,
            )
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
