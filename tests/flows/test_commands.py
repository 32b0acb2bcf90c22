"""The flows as functions of a script or a notebook: hooks, a loop that runs already, and errors as exceptions."""

import asyncio
import json
import os
import re
import signal
import threading
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from flows import StopTraining, replay, train
from flows.pipeline.lineage import ChangedRunError
from flows.run_flow import run_flow
from flows.training.summary import TrainSummary
from tasks.reports.iteration import IterationRecord
from tests.flows.conftest import REPOSITORY, TINY, Compare, Runs, Start, refused


def test_a_hook_ends_a_run_and_sees_every_iteration_again_when_it_resumes(
    empty: Runs, final: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, seen = empty.overrides(run__name="run"), list[tuple[int, bool]]()

    def stop(record: IterationRecord) -> bool:
        seen.append((record.iteration, record.stored))
        return record.metrics["reward"] > 0

    async def notebook() -> TrainSummary:
        return train(TINY, overrides=overrides, on_iteration=stop)

    stopped = asyncio.run(notebook())
    assert (stopped.iterations, stopped.stopped_early, seen) == (1, True, [(1, False)])

    async def keep(record: IterationRecord) -> str:
        seen.append((record.iteration, record.stored))
        return "logged"

    seen.clear()
    capsys.readouterr()
    ended = train(TINY, overrides=overrides, on_iteration=keep, progress=False)
    assert (ended.stopped_early, seen) == (False, [(1, True), (2, False)])
    assert capsys.readouterr().err == ""
    final(empty, Start(ended, ()))


def test_a_reason_to_stop_is_logged_and_another_error_ends_the_run(
    finished: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = finished.overrides(run__name="run", run__iterations=3)

    def raises(error: Exception) -> Any:
        def hook(record: IterationRecord) -> None:
            raise error

        return hook

    assert train(TINY, overrides=overrides, on_iteration=raises(StopTraining("good enough"))).iterations == 1
    assert "stopped after iteration 1: good enough" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError, match="of the hook"):
        train(TINY, overrides=overrides, on_iteration=raises(ZeroDivisionError("of the hook")), progress=False)


def test_other_settings_are_refused_unless_someone_is_asked(finished: Runs) -> None:
    overrides = finished.overrides(run__name="run", run__on_change="refuse", update__kl_coef=0.5)
    (error,) = refused(lambda: train(TINY, overrides=overrides, progress=False))
    assert (error.place, error.value) == ("run.name", "run")
    asked: list[int] = []

    def ask(change: ChangedRunError) -> list[str]:
        asked.append(change.iterations)
        return ["run.name=other", "run.iterations=1"]

    other = train(TINY, overrides=overrides, ask=ask, progress=False)
    assert (other.run, other.iterations, asked) == ("other", 1, [2])


def test_options_are_checked(finished: Runs) -> None:
    (error,) = refused(lambda: replay("run", root=str(finished.root), max_stalness=2))
    assert (error.place, error.value) == ("max_stalness", "max_stalness")


def test_an_interrupt_of_a_cell_cancels_its_run() -> None:
    ended: list[str] = []

    async def work() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def cell() -> None:
        run_flow(work, progress=False)

    loop, previous = asyncio.new_event_loop(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        signal.signal(signal.SIGINT, previous)
        loop.close()
    assert ended == ["cancelled"]


BLOCK = re.compile(r"(?:^    .*\n|^\n(?=    ))+", re.MULTILINE)


@pytest.mark.slow
def test_every_example_runs(server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("configs", "data"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    page = (REPOSITORY / "docs" / "python.md").read_text()
    for found in BLOCK.finditer(page):
        line = page.count("\n", 0, found.start())
        exec(compile("\n" * line + dedent(found[0]), "docs/python.md", "exec"), names)
    assert names["summary"].stopped_early
    assert names["summary"].iterations == len(names["seen"]) == 2
    assert names["heldout"].height == 2 * 4  # prompts, samples of each
    assert names["other"].iterations == 2
    assert names["loss"].requires_grad


@pytest.mark.slow
def test_the_notebook_runs(server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two iterations."""
    for name in ("configs", "data"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")
    names: dict[str, Any] = {}
    cells = json.loads((REPOSITORY / "docs" / "notebook.ipynb").read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]).replace("40", "2"), names)
    assert names["summary"].iterations == 2
    assert names["answers"].columns == ["prompt", "policy 0", "policy 2"]
    assert len(names["axes"].lines) == 4
