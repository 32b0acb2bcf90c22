"""Runs that are damaged, written or a stranger's, and a full disk: the run is untouched, and the rest goes on."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.runs.layout import SCORES_FILE
from tasks.storage.run_lock import locked
from tests.flows.conftest import flip, refused, sha256_of
from tests.flows.verification.conftest import verified
from tests.flows.verification.resealed import opened

NAME = "tiny_text"


@pytest.fixture
def run(stored: Callable[[str], Path], tmp_path: Path) -> Path:
    shutil.copytree(stored(NAME).parent, tmp_path / "runs")
    return tmp_path / "runs" / NAME


@pytest.mark.slow
def test_what_a_damaged_table_does_not_decide_is_computed(run: Path) -> None:
    table = f"iteration_000002/rewards/answer/{SCORES_FILE}"
    flip(run / table)
    before = sha256_of(run)
    report = verified(run.parent, NAME, iterations="2")
    assert sha256_of(run) == before
    levels = {stage.title: stage.level for stage in report.stages}
    assert levels["iteration 2: compute advantages"] == levels["iteration 2: score answer"] == "untried"
    assert levels["iteration 2: score brevity"] == levels["iteration 2: update policy"] == "equal"
    assert all(f"{SCORES_FILE} has sha256" in problem for problem in report.problems)
    assert (report.roots, report.exit_code) == ((), 1)


@pytest.mark.slow
def test_a_full_disk_keeps_what_was_verified(run: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(small_disk))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # Room for tables, and not for the weights and moments of a version.
    (small_disk / "full").write_bytes(bytes(7 * 2**20))
    before = sha256_of(run)
    report = verified(run.parent, NAME, iterations="1")
    assert sha256_of(run) == before
    assert {stage.level for stage in report.stages} == {"equal"}
    assert "iteration 1: compute advantages" in {stage.title for stage in report.stages}
    assert (report.complete, report.exit_code) == (False, 2)


@pytest.mark.slow
def test_a_run_that_is_written_is_refused(run: Path) -> None:
    before = sha256_of(run)
    with locked(opened(run), setting="run.name", value=NAME):
        (error,) = refused(lambda: verified(run.parent, NAME))
        assert (error.place, error.value) == ("RUN", NAME)
        assert "being written" in error.hint
    assert {name for name, digest in sha256_of(run).items() if before.get(name) != digest} <= {".incoming/lock"}


@pytest.mark.slow
def test_a_strangers_code_and_model_are_left_alone_and_the_rest_is_computed(
    run: Path, own_files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    canary, reward = tmp_path / "ran", own_files / "reward.py"
    before, code = sha256_of(run), reward.read_text()
    reward.write_text(f"open({str(canary)!r}, 'w').close()\n{code}")
    try:
        report = verified(
            run.parent, NAME, trust_code=False, iterations="2", stages="rollouts,rewards,advantages,update"
        )
    finally:
        reward.write_text(code)
    found = {stage.title: stage for stage in report.stages}
    assert {title for title, stage in found.items() if stage.level == "equal"} == {
        "iteration 2: score answer",
        "iteration 2: compute advantages",
    }
    untried = {title: stage.reason or "" for title, stage in found.items() if stage.level == "untried"}
    assert f"{reward}:brevity" in untried["iteration 2: score brevity"]
    assert "--trust-code" in untried["iteration 2: collect rollouts"]
    assert (report.exit_code, canary.exists(), sha256_of(run)) == (0, False, before)
