"""Log what a training or a replay has finished; without a tracker that fails the training continues."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import RunConfig
from tasks.progress import log
from tasks.reports.iteration import IterationRecord
from tasks.runs.layout import TRACKERS_FILE
from tasks.runs.run_view import EvaluationView
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import dump_checked, is_local, load_checked

if TYPE_CHECKING:
    from flows.tracking.backends import Backend, Step


@contextlib.contextmanager
def tracking(config: RunConfig, store: ArtifactStore) -> Iterator["RunTrackers"]:
    """Open the trackers of `run.trackers` when there is something to log, and close them at the end."""
    trackers = RunTrackers(config, store)
    try:
        yield trackers
    finally:
        trackers.finish()


class RunTrackers:
    """The trackers of one start of a run.

    `trackers.json` has the id of the run in each tracker and the step that was logged last. A later start logs later
    steps only; a tracker that is new to the run gets all of them, those from the cache too.
    """

    def __init__(self, config: RunConfig, store: ArtifactStore) -> None:
        """Read what was logged before; no tracker is opened yet."""
        self._config, self._store = config, store
        self._names = list(dict.fromkeys(config.run.trackers))
        self._records = _read_records(store) if self._names else {}
        self._open: dict[str, Backend] = {}

    def log(self, number: int, record: IterationRecord | None, evaluation: EvaluationView | None) -> None:
        """Log an iteration, and the evaluation of the policy that it made, in every tracker that does not have it yet.

        Args:
            number: iterations done; 0 before training.
            record: None before training.
            evaluation: None without one.
        """
        step: Step | None = None
        for name in [name for name in self._names if number > self._last_step(name)]:
            with self._leaving_out(name):
                if step is None:
                    from flows.tracking.backends import read_step

                    step = read_step(self._store, number, record, evaluation)
                backend = self._backend(name)
                backend.log(step)
                self._records[name] = {"id": backend.id, "step": number}
        if step is not None:
            self._store.write_file(TRACKERS_FILE, dump_checked(self._records))

    def _last_step(self, name: str) -> int:
        return int(self._records.get(name, {}).get("step", -1))

    def _backend(self, name: str) -> "Backend":
        from accelerate import PartialState

        from flows.tracking.backends import BACKENDS, Backend, TrackedRun

        if name not in self._open:
            # Accelerate's trackers log, and its loggers want to know the process.
            PartialState()
            config, store, known = self._config, self._store, self._records.get(name, {})
            run = TrackedRun(
                name=config.run.name,
                project=config.run.project,
                folder=tracker_folder(store),
                config=flat_settings({**config.model_dump(mode="json"), "folder": store.path()}),
                id=known.get("id"),
                step=known.get("step"),
            )
            self._open[name] = BACKENDS.get(name, Backend)(name, run)
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
                backend.finish()


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


def _read_records(store: ArtifactStore) -> dict[str, dict[str, Any]]:
    """Read trackers.json; without a valid one every tracker begins a new run."""
    try:
        found = load_checked(store.read_file(TRACKERS_FILE) or dump_checked({}))
    except ValueError as error:
        log(f"{store.run}/{TRACKERS_FILE} is damaged ({error}); trackers begin a new run")
        return {}
    return {name: record for name, record in found.items() if name != "checksum"}
