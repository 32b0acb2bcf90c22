"""Prefect's database gone, and what the runs of a root share: the run's own folder is enough to go on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.conftest import REPOSITORY, TINY, Runs, Start


@pytest.mark.slow
def test_a_run_goes_on_from_its_folder_alone(undisturbed: tuple[Runs, Start], tmp_path: Path) -> None:
    golden, first = undisturbed
    runs = Runs(tmp_path / "elsewhere")
    shutil.copytree(golden.path(), runs.path())
    for name in ("iteration_000002", "policies/000002"):
        shutil.rmtree(runs.path(name))
    runs.path("policies/000002.manifest.json").unlink()
    kept = {path: path.stat().st_mtime_ns for path in runs.path().rglob("*.parquet") if path.name != "metrics.parquet"}
    sets = [part for override in runs.overrides(run__name="run") for part in ("--set", override)]
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    # A server of its own, with a database that has never seen the run.
    environment.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-m", "flows.command_line.main", "train", str(TINY), *sets, "--json"]
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    with out.open("w") as stdout, err.open("w") as stderr:
        ended = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=stdout, stderr=stderr, check=False)
    assert ended.returncode == 0, err.read_text()
    told = json.loads(out.read_text().splitlines()[-1])
    assert told["policy_digest"] == first.summary.policy_digest
    assert runs.tables() == golden.tables()
    assert len(kept) > 4
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
