"""Log what a training or a replay has finished, with accelerate's trackers.

A tracker that fails is left out, and the training continues.
"""

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from configs.schema import RunConfig
from grpo_core.errors import InputError, first_line
from tasks.metrics import HELDOUT
from tasks.progress import log
from tasks.reports.groups import read_shown_samples
from tasks.reports.images import PromptImages, padded
from tasks.reports.iteration import IterationRecord
from tasks.reports.text import one_line
from tasks.runs.layout import ADVANTAGES, ROLLOUTS, STATES, TENSORBOARD, TRACKERS_FILE
from tasks.runs.read_run import evaluation_metrics
from tasks.runs.run_view import EvaluationView
from tasks.storage.artifacts.reference import PrunedArtifactError, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import dump_checked, is_local, load_checked

MAX_PROMPTS, MAX_SAMPLES, MAX_SIDE = 16, 4, 512
"""Held-out prompts and samples of each that are logged, and the longest side of an image in pixels."""

TITLE_LETTERS = 60

GAP = 4
"""White pixels between the images of a strip."""

_COLUMNS = (
    "sample_id",
    "group_id",
    "prompt",
    "sources",
    "target_uri",
    "target_sha256",
    "completion",
    "width",
    "height",
)
_FLUSHED_EVERY = "x_transaction_log_flush_interval"

Images = Mapping[str, Sequence[Image.Image]]
"""Images of each held-out prompt by its title."""


@contextlib.contextmanager
def tracking(config: RunConfig, store: ArtifactStore) -> Iterator["RunTrackers"]:
    """Open the trackers of `run.trackers` when there is something to log, and close them at the end."""
    trackers = RunTrackers(config, store)
    try:
        yield trackers
    finally:
        trackers.finish()


class RunTrackers:
    """The trackers of one start of a run; `trackers.json` has each one's id of the run and the step logged last.

    A later start logs later steps only; a tracker that is new to the run gets all of them, those from the cache too.
    """

    def __init__(self, config: RunConfig, store: ArtifactStore) -> None:
        """Read what was logged before; no tracker is opened yet."""
        self._config, self._store = config, store
        self._names = list(dict.fromkeys(config.run.trackers))
        self._records = _read_records(store) if self._names else {}
        self._open: dict[str, Backend] = {}

    def log(self, number: int, record: IterationRecord | None, evaluation: EvaluationView | None) -> None:
        """Log an iteration, 0 before training, and its policy's evaluation in every tracker that lacks it."""
        images: Images | None = None
        metrics: Mapping[str, float] = {}
        for name in [name for name in self._names if number > self._last_step(name)]:
            if images is None:
                metrics = record.metrics if record else evaluation_metrics(evaluation) if evaluation else {}
                images = {} if evaluation is None else self._images_of(evaluation)
            with self._leaving_out(name):
                backend = self._backend(name)
                backend.log(number, metrics, images)
                self._records[name] = {"id": backend.id, "step": number}
        if images is not None:
            self._store.write_file(TRACKERS_FILE, dump_checked(self._records))

    def _images_of(self, evaluation: EvaluationView) -> Images:
        """Return the held-out images; none, with a line about it, where a file of them is damaged or gone."""
        try:
            return read_images(self._store, evaluation)
        except (InputError, StaleReferenceError, OSError, ValueError) as error:
            log(f"trackers get no held-out images of policy {evaluation.version}: {first_line(error)}")
            return {}

    def _last_step(self, name: str) -> int:
        return int(self._records.get(name, {}).get("step", -1))

    def _backend(self, name: str) -> "Backend":
        if name not in self._open:
            from accelerate import PartialState

            # Accelerate's trackers log, and its loggers want to know the process.
            PartialState()
            if name == "swanlab" and "SWANLAB_API_KEY" not in os.environ:
                # It would ask for one.
                os.environ.setdefault("SWANLAB_MODE", "offline")
            kind = BACKENDS.get(name, Backend)
            self._open[name] = kind(name, self._config, self._store, self._records.get(name, {}))
        return self._open[name]

    @contextlib.contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """Warn once about a tracker that fails, whatever its error, and do without it."""
        try:
            # Some of them print, and the last line of stdout may be this program's own.
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except Exception as error:
            self._names.remove(name)
            self._open.pop(name, None)
            reason = next(iter(str(error).strip().splitlines()), "")
            log(f"tracker {name} failed ({type(error).__name__}: {reason}); the run continues without it")

    def finish(self) -> None:
        """Close the trackers."""
        for name, backend in list(self._open.items()):
            with self._leaving_out(name):
                backend.tracker.finish()


def _read_records(store: ArtifactStore) -> dict[str, dict[str, Any]]:
    """Read trackers.json; without a valid one every tracker begins a new run."""
    try:
        found = load_checked(store.read_file(TRACKERS_FILE) or dump_checked({}))
    except ValueError as error:
        log(f"{store.run}/{TRACKERS_FILE} is damaged ({error}); trackers begin a new run")
        return {}
    return {name: record for name, record in found.items() if name != "checksum"}


def read_images(store: ArtifactStore, evaluation: EvaluationView) -> Images:
    """Read the first samples of held-out prompts, of images that are not pruned, by `heldout/NN PROMPT`.

    The images in a prompt and its target come before its samples, on white of the samples' size.
    """
    with store.reading(without=(STATES,)) as read:
        try:
            table = read_shown_samples(read, evaluation.stages[ROLLOUTS], (), evaluation.stages[ADVANTAGES], _COLUMNS)
        except PrunedArtifactError:
            return {}
        groups = [] if table.is_text else [group[:MAX_SAMPLES] for group in table.groups[:MAX_PROMPTS]]
        names = [row["sample_id"] for group in groups for row in group]
        found = table.images(names, dict.fromkeys(names, MAX_SIDE))
    images_of, shown = PromptImages(MAX_SIDE, store), dict[str, Sequence[Image.Image]]()
    for index, group in enumerate(groups, start=1):
        if images := [found[row["sample_id"]] for row in group if row["sample_id"] in found]:
            target = images_of.target(group[0]["target_uri"], group[0]["target_sha256"])
            before = [*images_of.sources(group[0]), *([target] if target is not None else [])]
            # A slash would begin a group of its own.
            title = f"heldout/{index:02d} {one_line(group[0]['prompt'], TITLE_LETTERS).replace('/', ' ')}"
            shown[title] = [*(padded(each, images[0].size) for each in before), *images]
    return shown


def strip_of(images: Sequence[Image.Image]) -> Image.Image:
    """Place images of one size next to each other, with gaps between them."""
    width, height = images[0].size
    strip = Image.new("RGB", (len(images) * (width + GAP) - GAP, height), "white")
    for index, image in enumerate(images):
        strip.paste(image, (index * (width + GAP), 0))
    return strip


def tracker_folder(store: ArtifactStore) -> Path:
    """Return the local folder for trackers' files: the run's own; of a run in a bucket, `trackers/RUN`."""
    return Path(store.path()) if is_local(store.filesystem) else Path("trackers", store.run)


def flat_settings(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return settings by their paths, `update.learning_rate`; lists as JSON."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_settings(value, f"{path}{name}.")
        else:
            flat[f"{path}{name}"] = json.dumps(value) if isinstance(value, list | Mapping) else value
    return flat


class Backend:
    """A tracker of accelerate, which begins a new run at each start unless its class `continues`, by the run's id."""

    continues = False
    """Whether a later start continues the same run."""

    log_options: ClassVar[Mapping[str, Any]] = {}
    """Options of the tracker's `log`."""

    def __init__(self, kind: str, config: RunConfig, store: ArtifactStore, known: Mapping[str, Any]) -> None:
        """Start the tracker, and store the settings of a run that is new to it; `known` has its id and last step."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        self.name, self.project, self.folder = config.run.name, config.run.project, tracker_folder(store)
        self.known_id, self.last_step = known.get("id"), known.get("step")
        self.id: str | None = (self.known_id or uuid.uuid4().hex[:21]) if self.continues else None
        self.tracker = LOGGER_TYPE_TO_CLASS[kind](**self.arguments())
        # The flow runs in one process, so nothing has to be left to the first of several.
        self.tracker.main_process_only = False
        self.tracker.start()
        if self.known_id is None:
            self.store_config(flat_settings({**config.model_dump(mode="json"), "folder": store.path()}))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of accelerate's tracker."""
        return {"run_name": self.project}

    def store_config(self, settings: dict[str, Any]) -> None:
        """Store the settings as hyperparameters."""
        self.tracker.store_init_configuration(settings)

    def log(self, number: int, metrics: Mapping[str, float], images: Images) -> None:
        """Log the images of an iteration, if the tracker takes a list of them, and its metrics."""
        if images and hasattr(self.tracker, "log_images"):
            self.log_images(number, images)
        self.tracker.log(dict(metrics), step=number, **self.log_options)

    def log_images(self, number: int, images: Images) -> None:
        """Log the images of each held-out prompt under its title."""
        self.tracker.log_images({title: list(shown) for title, shown in images.items()}, step=number)


class TensorBoard(Backend):
    """Writes to the folder `tensorboard`; a start that continues the run replaces the steps after the last one."""

    continues = True

    def arguments(self) -> dict[str, Any]:
        """Return the folder, and the first step that a reader takes from the new file only."""
        purged = {} if self.last_step is None else {"purge_step": self.last_step + 1}
        return {"run_name": TENSORBOARD, "logging_dir": self.folder, **purged}

    def store_config(self, settings: dict[str, Any]) -> None:
        """Store the settings with the run; accelerate's way makes two more runs, named by their time."""
        from torch.utils.tensorboard.summary import hparams

        written = {name: "null" if value is None else value for name, value in settings.items()}
        for summary in hparams(written, {"reward": 0.0, HELDOUT: 0.0}):
            self.tracker.tracker.file_writer.add_summary(summary)

    def log_images(self, number: int, images: Images) -> None:
        """Log the images of each held-out prompt as one strip."""
        strips = {title: np.asarray(strip_of(shown))[None] for title, shown in images.items()}
        self.tracker.log_images(strips, step=number, dataformats="NHWC")


class WandB(Backend):
    """Weights & Biases: offline unless WANDB_MODE says otherwise or an API key is configured."""

    continues = True
    # A step that is committed is kept if the process is killed.
    log_options: ClassVar[Mapping[str, Any]] = {"commit": True}

    def arguments(self) -> dict[str, Any]:
        """Continue the run of this id where there is one."""
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
        mode = {"mode": "offline"} if offline else {}
        # Of what a killed process has logged, W&B would lose the last 15 seconds; the setting is no stable one.
        seconds: dict[str, Any] = {_FLUSHED_EVERY: 1.0} if _FLUSHED_EVERY in wandb.Settings.model_fields else {}
        return {
            "run_name": self.project,
            "name": self.name,
            "id": self.id,
            "resume": "allow",
            "dir": str(self.folder),
            # The terminal belongs to the progress of the run.
            "settings": wandb.Settings(console="off", silent=True, **seconds),
            **mode,
        }


class MLflow(Backend):
    """MLflow, at MLFLOW_TRACKING_URI or on local files."""

    continues = True

    def arguments(self) -> dict[str, Any]:
        """Continue the run of this id where there is one."""
        return {"experiment_name": self.project, "run_name": self.name, "run_id": self.known_id}

    def log(self, number: int, metrics: Mapping[str, float], images: Images) -> None:
        """Log the metrics; MLflow itself names the run."""
        self.id = self.tracker.tracker.info.run_id
        super().log(number, metrics, images)


BACKENDS: Mapping[str, type[Backend]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""Trackers that continue a run, by name; the others are served by `Backend`."""
