import json
from pathlib import Path

from typer.testing import CliRunner

from flows.command_line.main import application
from flows.inspection.list_runs import list_runs
from tasks.storage.run_lock import locked
from tests.flows.conftest import refused
from tests.tasks.reports.made_runs import RunMaker, whole_run


def test_runs_with_their_state_and_last_figures(tmp_path: Path) -> None:
    whole_run(tmp_path)
    begun = RunMaker(tmp_path, "begun", planned=4)
    begun.iteration(1)
    (tmp_path / "notes").mkdir()
    with locked(begun.store, setting="run.name", value="begun"):
        made, other = list_runs(str(tmp_path))
        assert (other.run, other.state) == ("begun", "running")
    assert (made.run, made.state, made.iterations, made.planned) == ("made", "finished", 2, 2)
    assert (made.reward, made.heldout) == (0.6, 0.75)
    result = CliRunner().invoke(application, ["list", str(tmp_path), "--json"])
    (_, printed) = json.loads(result.stdout)["runs"]
    assert printed | {"run": "begun", "state": "stopped", "iterations": 1, "planned": 4, "heldout": None} == printed


def test_a_folder_that_is_missing_is_refused_and_an_empty_one_has_no_runs(tmp_path: Path) -> None:
    assert list_runs(str(tmp_path)) == []
    (error,) = refused(lambda: list_runs(str(tmp_path / "none")))
    assert error.place == "ROOT"
