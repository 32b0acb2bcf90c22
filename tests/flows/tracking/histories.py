"""A stored run that is logged as a training logs it, and readers of what trackers wrote."""

import copy
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.loader import read_config
from configs.schema import RunConfig
from flows.tracking.log import tracking
from tasks.reports.iteration import IterationRecord
from tasks.runs.run_view import EvaluationView
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import TINY
from tests.tasks.reports.made_runs import RunMaker, whole_run

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
