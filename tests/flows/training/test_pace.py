"""The end of an iteration's line: its own time, what another run made, and the time that is left."""

from dataclasses import replace

import pytest

from flows.training.callbacks import format_progress_line
from flows.training.history import TrainingHistory
from tasks.reports.iteration import IterationRecord
from tasks.storage.artifacts.reference import ArtifactRef

ADVANTAGES = ArtifactRef(uri="r/a", sha256="", digest="", schema_version=1, rows=1, seconds=1.0, metrics={})
SECONDS = {"rollouts": 4.0, "rewards": 2.0, "advantages": 1.0, "update": 3.0}
RECORD = IterationRecord(2, (), ADVANTAGES, {"reward": 0.5, **{f"seconds/{name}": s for name, s in SECONDS.items()}})


@pytest.mark.parametrize(
    ("reused", "each", "end"),
    [
        ({}, None, "10.0 s"),
        ({}, 65.0, "10.0 s, about 1:02:50 left"),  # 58 times 65 s
        (dict.fromkeys(SECONDS, "tiny"), None, "reused from run tiny"),
        ({"rollouts": "tiny", "rewards": "tiny"}, None, "4.0 s, rollouts, rewards reused from run tiny"),
    ],
)
def test_the_end_of_a_line(reused: dict[str, str], each: float | None, end: str) -> None:
    line = format_progress_line(replace(RECORD, reused=reused), 60, each)
    assert line == f"iteration 2/60: reward 0.500, {end}"


def test_stored_iterations_and_the_first_that_is_trained_do_not_count() -> None:
    history, paces = TrainingHistory(name="run", folder="runs/run"), []
    for stored, seconds in ((True, 900.0), (True, 900.0), (False, 100.0), (False, 10.0), (False, 20.0)):
        history.iterations.append(replace(RECORD, stored=stored, metrics={"wall_time": seconds}))
        paces.append(history.pace)
    assert paces == [None, None, None, 10.0, 15.0]
