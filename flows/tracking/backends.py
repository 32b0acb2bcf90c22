"""What trackers get of an iteration, and how each of accelerate's trackers continues a run.

Everything else is accelerate's.
"""

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from PIL import Image

from tasks.metrics import HELDOUT
from tasks.reports.iteration import IterationRecord
from tasks.reports.samples import Row, read_samples
from tasks.reports.text import one_line
from tasks.runs.layout import ADVANTAGES, ROLLOUTS, STATES, TENSORBOARD
from tasks.runs.read_run import evaluation_metrics
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


_FLUSHED_EVERY = "x_transaction_log_flush_interval"


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is opened for.

    Attributes:
        name: of the run.
        project: project or experiment that it belongs to.
        folder: local folder for the tracker's files: the run's own, or one beside the working directory's other files
            where the run is in a bucket.
        config: settings by path, `update.learning_rate`, and the address of the run.
        id: what the tracker calls the run; None for a new one.
        step: iteration that was logged last; None for a new run.
    """

    name: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    id: str | None
    step: int | None


class Backend:
    """A tracker of accelerate, which begins a new run at each start.

    Attributes:
        id: what the tracker calls the run, to continue it; None if it cannot.
    """

    continues = False
    """Whether a later start continues the same run."""

    log_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Options of the tracker's `log`."""

    def __init__(self, kind: str, run: TrackedRun) -> None:
        """Start the tracker, and store the settings of a run that is new to it."""
        self.id: str | None = (run.id or uuid.uuid4().hex[:21]) if self.continues else None
        self.tracker = LOGGER_TYPE_TO_CLASS[kind](**self.arguments(run))
        # The flow runs in one process, so nothing has to be left to the first of several.
        self.tracker.main_process_only = False
        self.tracker.start()
        if run.id is None:
            self.store_config(run)

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Return the arguments of accelerate's tracker."""
        return {"run_name": run.project}

    def store_config(self, run: TrackedRun) -> None:
        """Store the settings as hyperparameters."""
        self.tracker.store_init_configuration(dict(run.config))

    def log(self, step: Step) -> None:
        """Log the images of an iteration, if the tracker takes a list of them, and its metrics."""
        if step.images and hasattr(self.tracker, "log_images"):
            self.log_images(step.images, step.number)
        self.tracker.log(dict(step.metrics), step=step.number, **self.log_options)

    def log_images(self, images: Mapping[str, Sequence[Image.Image]], number: int) -> None:
        """Log the images of each held-out prompt under its title."""
        self.tracker.log_images({title: list(shown) for title, shown in images.items()}, step=number)

    def finish(self) -> None:
        """Write what is left, and close the run."""
        self.tracker.finish()


class TensorBoard(Backend):
    """Writes to the folder `tensorboard`; a start that continues the run replaces the steps after the last one."""

    continues = True

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Return the folder, and the first step that a reader takes from the new file only."""
        purged = {} if run.step is None else {"purge_step": run.step + 1}
        return {"run_name": TENSORBOARD, "logging_dir": run.folder, **purged}

    def store_config(self, run: TrackedRun) -> None:
        """Store the settings with the run; accelerate's way makes two more runs, named by their time."""
        from torch.utils.tensorboard.summary import hparams

        settings = {name: "null" if value is None else value for name, value in run.config.items()}
        for summary in hparams(settings, {"reward": 0.0, HELDOUT: 0.0}):
            self.tracker.tracker.file_writer.add_summary(summary)

    def log_images(self, images: Mapping[str, Sequence[Image.Image]], number: int) -> None:
        """Log the images of each held-out prompt, which have one size, as one grid."""
        grids = {title: np.stack([np.asarray(image) for image in shown]) for title, shown in images.items()}
        self.tracker.log_images(grids, step=number, dataformats="NHWC")


class WandB(Backend):
    """Weights & Biases: offline unless WANDB_MODE says otherwise or an API key is configured."""

    continues = True
    # A step that is committed is kept if the process is killed.
    log_options = MappingProxyType({"commit": True})

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Continue the run of this id where there is one."""
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
        mode = {"mode": "offline"} if offline else {}
        # Of what a killed process has logged, W&B would lose the last 15 seconds; the setting is no stable one.
        seconds: dict[str, Any] = {_FLUSHED_EVERY: 1.0} if _FLUSHED_EVERY in wandb.Settings.model_fields else {}
        return {
            "run_name": run.project,
            "name": run.name,
            "id": self.id,
            "resume": "allow",
            "dir": str(run.folder),
            # The terminal belongs to the progress of the run.
            "settings": wandb.Settings(console="off", silent=True, **seconds),
            **mode,
        }


class MLflow(Backend):
    """MLflow, at MLFLOW_TRACKING_URI or on local files."""

    continues = True

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Continue the run of this id where there is one."""
        return {"experiment_name": run.project, "run_name": run.name, "run_id": run.id}

    def log(self, step: Step) -> None:
        """Log the metrics; MLflow itself names the run."""
        self.id = self.tracker.tracker.info.run_id
        super().log(step)


class Trackio(Backend):
    """trackio, in its local folder or in the Space that its own variables name."""

    continues = True

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Continue the run of this name; trackio knows runs by their names, so the name has the id."""
        return {"run_name": run.project, "name": f"{run.name}-{self.id}", "resume": "allow"}


class SwanLab(Backend):
    """SwanLab: offline unless SWANLAB_MODE or SWANLAB_API_KEY is set."""

    continues = True

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Continue the run of this id where there is one."""
        known = {"SWANLAB_MODE", "SWANLAB_API_KEY"} & {*os.environ}
        return {
            "run_name": run.project,
            "name": run.name,
            "id": self.id,
            "resume": "allow",
            "log_dir": str(run.folder / "swanlab"),
            **({} if known else {"mode": "offline"}),
        }


BACKENDS: Mapping[str, type[Backend]] = MappingProxyType(
    {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio, "swanlab": SwanLab}
)
"""Trackers that continue a run, by name; the others are served by `Backend`."""
