"""How each of accelerate's trackers goes on with a run, and what it calls an image, a text and a histogram.

Everything else is accelerate's: these classes give its trackers their arguments and the values to log.
"""

import importlib
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from flows.tracking.step import Step
from tasks.metrics.names import HELDOUT
from tasks.runs.layout import TENSORBOARD

REWARDS = "reward_histogram"
"""Name of the histogram of an iteration's rewards."""

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
    """A tracker of accelerate that gets metrics and settings, and begins a new run at each start.

    Attributes:
        id: what the tracker calls the run, to go on with it; None if it cannot.
    """

    kept = False
    """Whether a later start goes on with the same run."""

    library: ClassVar[str | None] = None
    """Module with the classes Image and Histogram; None for a tracker without."""

    histograms = True
    """Whether the library has histograms."""

    def __init__(self, kind: str, run: TrackedRun) -> None:
        """Start the tracker, and store the settings of a run that is new to it."""
        self.id: str | None = (run.id or uuid.uuid4().hex[:21]) if self.kept else None
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
        """Log everything of an iteration that the tracker can show."""
        self.tracker.log({**step.metrics, **self.media(step)}, step=step.number)

    def media(self, step: Step) -> dict[str, Any]:
        """Return the histogram, an image with its caption for each held-out prompt, and texts, by name."""
        if self.library is None:
            return {}
        library = importlib.import_module(self.library)
        made: dict[str, Any] = {}
        if step.rewards and self.histograms:
            made[REWARDS] = library.Histogram(step.rewards)
        for each in step.heldout:
            if each.strip is not None:
                made[f"heldout/{each.title}"] = library.Image(each.strip, caption=each.caption)
        if any(each.texts for each in step.heldout):
            made["heldout"] = self.texts(library, step)
        return made

    def texts(self, library: Any, step: Step) -> Any:
        """Return the held-out prompts with their completions and rewards as an object of the tracker's library."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write what is left, and close the run."""
        self.tracker.finish()


class TensorBoard(Backend):
    """Writes to the folder `tensorboard`; a start that goes on replaces the steps after the last one."""

    kept = True

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

    def log(self, step: Step) -> None:
        """Log scalars, the histogram, a strip of images for each held-out prompt, and the prompts with rewards."""
        writer = self.tracker.tracker
        if step.rewards:
            writer.add_histogram(REWARDS, np.asarray(step.rewards), global_step=step.number)
        strips = {f"heldout/{each.title}": each.strip for each in step.heldout if each.strip is not None}
        for title, strip in strips.items():
            writer.add_image(title, np.asarray(strip), global_step=step.number, dataformats="HWC")
        # Its last line writes everything to disk.
        self.tracker.log({**step.metrics, **({"heldout": step.page} if step.heldout else {})}, step=step.number)


class WandB(Backend):
    """Weights & Biases: offline unless WANDB_MODE says otherwise or an API key is configured."""

    kept = True
    library = "wandb"

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Go on with the run of this id where there is one."""
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

    def log(self, step: Step) -> None:
        """Log and commit the iteration, so that it is kept if the process is killed."""
        self.tracker.log({**step.metrics, **self.media(step)}, step=step.number, commit=True)

    def texts(self, library: Any, step: Step) -> Any:
        """Return a table with a row per completion."""
        rows = [
            [each.prompt, reward, text]
            for each in step.heldout
            for reward, text in zip(each.rewards, each.texts, strict=False)
        ]
        return library.Table(columns=["prompt", "reward", "completion"], data=rows)


class MLflow(Backend):
    """MLflow, at MLFLOW_TRACKING_URI or on local files; it has no histograms."""

    kept = True

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Go on with the run of this id where there is one."""
        return {"experiment_name": run.project, "run_name": run.name, "run_id": run.id}

    def log(self, step: Step) -> None:
        """Log metrics, images with steps, and the held-out prompts with their rewards as a Markdown file."""
        import mlflow

        self.id = self.tracker.tracker.info.run_id
        for each in step.heldout:
            if each.strip is not None:
                # It refuses other letters in a name.
                title = re.sub(r"[^A-Za-z0-9_. -]", "_", f"heldout {each.title}")
                mlflow.log_image(each.strip, key=title, step=step.number)
        if step.heldout:
            mlflow.log_text(step.page, f"heldout/{step.number:06d}.md")
        super().log(step)


class Trackio(Backend):
    """trackio, in its local folder or in the Space that its own variables name."""

    kept = True
    library = "trackio"

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Go on with the run of this name; trackio knows runs by their names, so the name has the id."""
        return {"run_name": run.project, "name": f"{run.name}-{self.id}", "resume": "allow"}

    def texts(self, library: Any, step: Step) -> Any:
        """Return them as Markdown."""
        return library.Markdown(step.page)


class SwanLab(Backend):
    """SwanLab: offline unless SWANLAB_MODE or SWANLAB_API_KEY is set; it has no histograms."""

    kept = True
    library = "swanlab"
    histograms = False

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Go on with the run of this id where there is one."""
        known = {"SWANLAB_MODE", "SWANLAB_API_KEY"} & {*os.environ}
        return {
            "run_name": run.project,
            "name": run.name,
            "id": self.id,
            "resume": "allow",
            "log_dir": str(run.folder / "swanlab"),
            **({} if known else {"mode": "offline"}),
        }

    def texts(self, library: Any, step: Step) -> Any:
        """Return them as Markdown."""
        return library.Text(step.page)


BACKENDS: Mapping[str, type[Backend]] = MappingProxyType(
    {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio, "swanlab": SwanLab}
)
"""Trackers that go on with a run and show samples, by name; the others are served by `Backend`."""
