"""A stored run that is logged as a training logs it, and readers of what trackers wrote."""

import copy
import io
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.loader import read_config
from configs.schema import RunConfig
from flows.preflight.model import check_trackers
from flows.preflight.prompts import PromptFiles
from flows.tracking import read_images, tracking
from tasks.reports.iteration import IterationRecord
from tasks.runs.layout import TRACKERS_FILE
from tasks.runs.run_view import EvaluationView
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import TINY, Runs, Start, heard_of
from tests.tasks.reports.made_runs import RunMaker, colour, flip_last_byte, png, whole_run

EVALUATED = (0, 2)
METRICS = {number: {"reward": 0.1 * number, "kl": 0.01 * number, "num_tokens": 16.0 * number} for number in (1, 2, 3)}


class TrackedRun:
    """A stored run of three iterations, evaluated before them and after the second."""

    def __init__(self, root: Path, **options: Any) -> None:
        maker: RunMaker = whole_run(root, side=6, **options)
        maker.iteration(3)
        self.store = maker.store

    @property
    def folder(self) -> Path:
        return Path(self.store.path())

    def copied(self, root: Path) -> "TrackedRun":
        shutil.copytree(self.store.root, root)
        other = copy.copy(self)
        other.store = ArtifactStore(str(root), self.store.run)
        return other

    def config(self, *trackers: str) -> RunConfig:
        names = ", ".join(trackers)
        return read_config(TINY, [f"run.name={self.store.run}", f"run.trackers=[{names}]", "run.project=mine"])

    def _found(self, folder: str) -> Any:
        found = self.store.find(folder)
        assert found is not None
        return found

    def log(self, iterations: int, *trackers: str) -> None:
        """One start of the run, which ends after this many iterations."""
        with tracking(self.config(*trackers), self.store) as opened:
            for number in range(iterations + 1):
                advantages = self._found(f"iteration_{number:06d}/advantages") if number else None
                record = IterationRecord(number, (), advantages, METRICS[number]) if number else None
                opened.log(number, record, self._evaluation(number) if number in EVALUATED else None)

    def _evaluation(self, version: int) -> EvaluationView:
        stages = {name: (self._found(f"evaluations/{version:06d}/{name}"),) for name in ("rollouts", "advantages")}
        return EvaluationView(version, stages, {})


def wandb_records(path: Path) -> Iterator[Any]:
    """Read the records of an offline run: W&B's protocol buffers in blocks of LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, record = path.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while place + 7 <= len(content):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        record = (record if kind in (3, 4) else b"") + content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(record)


FIRST = "heldout/01 a red square"


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0, "tensors": 0}
    )
    accumulator.Reload()
    return accumulator


def scalars(accumulator: EventAccumulator, name: str) -> dict[int, float]:
    found = accumulator.Scalars(name)
    assert len({event.step for event in found}) == len(found)
    return {event.step: event.value for event in found}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> TrackedRun:
    return TrackedRun(tmp_path_factory.mktemp("stored"))


@pytest.fixture
def run(stored: TrackedRun, tmp_path: Path) -> TrackedRun:
    return stored.copied(tmp_path / "runs")


def test_tensorboard_has_metrics_images_and_settings(run: TrackedRun) -> None:
    run.log(2, "tensorboard")
    read = events(run.folder / "tensorboard")
    for name in ("reward", "kl", "num_tokens"):
        assert scalars(read, name) == {number: np.float32(METRICS[number][name]) for number in (1, 2)}
    assert scalars(read, "heldout_reward") == {0: 0.5}
    (before, after) = read.Images(FIRST)
    assert (before.step, after.step) == (0, 2)
    strip = Image.open(io.BytesIO(after.encoded_image_string))
    # Four images of six pixels, and three gaps of four.
    assert strip.size == (36, 6)
    assert [strip.getpixel((10 * sibling + 3, 3)) for sibling in range(4)] == [
        colour(0, sibling) for sibling in range(4)
    ]
    assert {strip.getpixel((10 * sibling + x, 3)) for sibling in range(3) for x in range(6, 10)} == {(255, 255, 255)}
    settings = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"update.learning_rate" in settings
    assert str(run.folder).encode() in settings


@pytest.mark.parametrize("killed", [False, True], ids=["finished", "killed after the second step"])
def test_a_later_start_logs_no_step_twice(run: TrackedRun, killed: bool) -> None:
    run.log(1, "tensorboard")
    noted = run.store.read_file(TRACKERS_FILE) or b""
    if killed:
        run.log(2, "tensorboard")
        run.store.write_file(TRACKERS_FILE, noted)
    run.log(3, "tensorboard")
    read = events(run.folder / "tensorboard")
    assert scalars(read, "reward") == {number: np.float32(METRICS[number]["reward"]) for number in (1, 2, 3)}
    assert [event.step for event in read.Images(FIRST)] == [0, 2]


def test_a_tracker_that_is_new_to_the_run_gets_every_step(run: TrackedRun) -> None:
    run.log(3)
    assert run.store.read_file(TRACKERS_FILE) is None
    run.log(3, "tensorboard")
    assert [*scalars(events(run.folder / "tensorboard"), "reward")] == [1, 2, 3]


def test_of_texts_the_metrics_alone_are_logged(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path, modality="text")
    run.log(2, "tensorboard")
    read = events(run.folder / "tensorboard")
    assert [*scalars(read, "reward")] == [1, 2]
    assert not read.Tags()["images"]


@pytest.mark.slow
def test_wandb_offline_goes_on_with_the_same_run(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    for iterations in (1, 3):
        assert heard_of(lambda last=iterations: run.log(last, "wandb"))[1].lines == []
        # Its service writes the end of a file after the run has finished; this waits for it.
        wandb.teardown()
    history: dict[int, dict[str, Any]] = {}
    ids = set()
    for path in sorted(run.folder.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
            if record.WhichOneof("record_type") == "history":
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                assert history.setdefault(record.history.step.num, values) is values
    assert len(ids) == 1
    assert {name for _, *names in ids for name in names} == {"mine", "made"}
    assert {step: json.loads(values["reward"]) for step, values in history.items() if step} == {
        number: METRICS[number]["reward"] for number in (1, 2, 3)
    }
    names = json.loads(history[2][f"{FIRST}/filenames"])
    shown = [next(run.folder.glob(f"wandb/offline-run-*/files/{name}")) for name in names]
    assert [Image.open(path).getpixel((3, 3)) for path in shown] == [colour(0, sibling) for sibling in range(4)]


def test_mlflow_goes_on_with_the_same_run(run: TrackedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    run.log(1, "mlflow")
    run.log(3, "mlflow")
    client = mlflow.MlflowClient()
    (only,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert only.info.run_name == "made"
    assert only.data.params["update.learning_rate"]
    rewards = client.get_metric_history(only.info.run_id, "reward")
    assert {each.step: each.value for each in rewards} == {number: METRICS[number]["reward"] for number in (1, 2, 3)}
    assert len(rewards) == 3


class Leaving(GeneralTracker):
    """A tracker of a user's own whose service goes away at the second step."""

    name, requires_logging_directory = "leaving", False
    tracker = None

    def __init__(self, run_name: str) -> None:
        super().__init__()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if step == 2:
            raise ConnectionError("the service is gone")


class Absent(Leaving):
    """One whose service is not there."""

    name = "absent"

    def start(self) -> None:
        raise TimeoutError("no answer\nin 90 seconds")


class Noting(Leaving):
    """One that only accelerate knows."""

    name, noted = "noting", list[object]()

    def start(self) -> None:
        self.noted.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.noted.append(values["run.project"])

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.noted.append(step)


def test_another_tracker_begins_a_new_run_at_each_start_with_what_is_new(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, Noting.name, Noting)
    run.log(1, "noting")
    run.log(3, "noting")
    assert Noting.noted == ["start", "mine", 0, 1, "start", "mine", 2, 3]


def test_a_tracker_that_fails_is_reported_once_and_left_out(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Leaving, Absent):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, kind.name, kind)
    _, heard = heard_of(lambda: run.log(3, "absent", "leaving", "tensorboard"))
    assert [line.split(";")[0] for line in heard.lines] == [
        "tracker absent failed (TimeoutError: no answer)",
        "tracker leaving failed (ConnectionError: the service is gone)",
    ]
    assert [*scalars(events(run.folder / "tensorboard"), "reward")] == [1, 2, 3]


def test_a_damaged_image_costs_no_tracker(run: TrackedRun) -> None:
    evaluation = run._evaluation(0)
    flip_last_byte(run.folder / "evaluations/000000/rollouts/images-00000.parquet")
    with tracking(run.config("tensorboard"), run.store) as opened:
        _, heard = heard_of(lambda: opened.log(0, None, evaluation))
        opened.log(1, IterationRecord(1, (), run._found("iteration_000001/advantages"), METRICS[1]), None)
    (line,) = heard.lines
    assert line.startswith("trackers get no held-out images of policy 0: ")
    assert [*scalars(events(run.folder / "tensorboard"), "reward")] == [1]


def test_a_finished_training_is_logged_as_it_was_stored_and_ends_well_when_a_tracker_fails(
    finished: Runs, undisturbed: tuple[Runs, Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    import polars as pl

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, Leaving.name, Leaving)
    start = finished.start(run__trackers=["leaving", "tensorboard"], run__project="mine")
    assert start.stages == ()
    assert start.summary.policy_digest == undisturbed[1].summary.policy_digest
    read = events(finished.path("tensorboard"))
    table = pl.read_parquet(finished.path() / "iteration_*" / "metrics.parquet")
    for name, rows in table.group_by("metric"):
        expected = {step: np.float32(value) for step, value in rows.select("iteration", "value").iter_rows()}
        assert scalars(read, str(name[0])) == expected


def test_unknown_and_missing_trackers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking._available_trackers", ["tensorboard"])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, Leaving.name, Leaving)
    config = read_config(TINY, ["run.trackers=[tensorboard, swanlab, tensorbord, leaving]"])
    problems = list(check_trackers(config, PromptFiles({}, (), ())))
    assert [(each.place, each.value) for each in problems] == [
        ("run.trackers.1", "swanlab"),
        ("run.trackers.2", "tensorbord"),
    ]


def test_images_of_prompts_and_targets_come_before_the_samples_at_their_size(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, side=6)
    maker.sources = {0: [png((9, 8, 7), side=3)]}
    maker.targets = {0: tmp_path / "target.png"}
    maker.targets[0].write_bytes(png((1, 2, 3), side=12))
    maker.evaluation(0, shift=0.0)
    stages = {name: (maker.store.find(f"evaluations/000000/{name}"),) for name in ("rollouts", "advantages")}
    shown = read_images(maker.store, EvaluationView(0, stages, {}))  # type: ignore[arg-type]
    first, second = shown.values()
    assert [image.size for image in first] == [(6, 6)] * 6
    assert [image.getpixel((0, 0)) for image in first[:2]] == [(9, 8, 7), (1, 2, 3)]
    assert len(second) == 4
