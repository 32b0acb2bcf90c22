"""Prefect's database is lost: the run's folder is enough to continue."""

import shutil
from pathlib import Path

import pytest

from tests.flows.conftest import Runs, Start, printed_summary, training_process


@pytest.mark.slow
def test_a_run_continues_from_its_folder_alone(undisturbed: tuple[Runs, Start], tmp_path: Path) -> None:
    golden, first = undisturbed
    runs = Runs(tmp_path / "elsewhere")
    shutil.copytree(golden.path(), runs.path())
    for name in ("iteration_000002", "policies/000002"):
        shutil.rmtree(runs.path(name))
    runs.path("policies/000002.manifest.json").unlink()
    kept = {path: path.stat().st_mtime_ns for path in runs.path().rglob("*.parquet") if path.name != "metrics.parquet"}
    assert len(kept) > 4
    # Without an address it starts a temporary server, whose database has never seen the run.
    with training_process(runs, tmp_path / "process", environment={"PREFECT_API_URL": ""}) as training:
        assert training.wait() == 0, (tmp_path / "process" / "err").read_text()
    assert printed_summary(tmp_path / "process")["policy_digest"] == first.summary.policy_digest
    assert runs.tables() == golden.tables()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
