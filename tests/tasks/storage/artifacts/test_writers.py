"""An artifact is complete or absent, with several writers and after a kill at any step."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.storage.artifacts.commit import left_over
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.restore import restore_artifact
from tasks.storage.artifacts.run_folder import INCOMING
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import is_local
from tests.tasks.storage.made_artifacts import (
    FILES,
    FOLDER,
    MANIFEST,
    NESTED,
    ON_EACH_KIND_OF_ROOT,
    Steps,
    another,
    commit,
    contents,
    delete,
    moved,
    read,
    root_url,
    writer_elsewhere,
)

# Both writers have the same result for the first three runs, and each its own for the others.
AT_ONCE = """
import sys
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.storage.made_artifacts import commit

root, number = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for turn in range(6):
    rows = 4 if turn < 3 else 4 + number
    print(commit(ArtifactStore(root, f"run{turn}"), seconds=float(number), rows=rows).sha256, flush=True)
"""


@ON_EACH_KIND_OF_ROOT
def test_writers_at_once_get_the_first_result_or_quarantine_it(store: ArtifactStore, tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    commands = [[sys.executable, "-c", AT_ONCE, root_url(store), str(number)] for number in range(2)]
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(subprocess.Popen(command, **pipes)) for command in commands]
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        for writer in writers:
            writer.stdin.write(b"go\n")
            writer.stdin.flush()
        written = [writer.communicate(timeout=300)[0].decode().split() for writer in writers]
        assert [writer.returncode for writer in writers] == [0, 0]
    for turn in range(6):
        run = another(store, f"run{turn}")
        found = run.find(FOLDER)
        references = [found.model_copy(update={"sha256": each[turn]}) for each in written]
        if turn < 3:
            assert references == [found, found]
            assert read(run, found, tmp_path / str(turn)) == FILES
            assert moved(run) == [] or not is_local(store.filesystem)
        else:
            assert found in references
            assert read(run, found, tmp_path / str(turn)) == FILES
            if is_local(store.filesystem):
                # In a bucket no lock orders them: the last one's files may lie under the first one's manifest.
                assert moved(run) == ["another result of the same stage took its place"]
                assert [restore_artifact(run, each) for each in references] == references


CHANGES: dict[str, Callable[[ArtifactStore, ArtifactRef], ArtifactRef]] = {
    "another result": lambda store, reference: commit(store, rows=5),
    "fewer files": lambda store, reference: delete(store, reference, [NESTED]),
    "no files": lambda store, reference: delete(store, reference, FILES),
}
KILL = """
import sys
from tests.tasks.storage.artifacts.test_writers import prepare
from tests.tasks.storage.made_artifacts import kill_before_each_step
kill_before_each_step(lambda number: prepare(sys.argv[1], f"run{number}", sys.argv[2]))
"""


def prepare(url: str, run: str, change: str) -> Callable[[], tuple[Steps, Callable[[], object]]]:
    """Commit an artifact, and return what changes it in another process; a step is a change of the disk or bucket."""
    reference = commit(ArtifactStore(url, run))

    def begin() -> tuple[Steps, Callable[[], object]]:
        store = ArtifactStore(url, run)
        requests: Steps = [(store.filesystem, name) for name in ("put_file", "pipe_file", "cp_file")]
        changing = [(Path, "rename"), (Path, "replace"), (os, "fsync")] if is_local(store.filesystem) else requests
        return [(store.filesystem, "rm_file"), *changing], lambda: CHANGES[change](store, reference)

    return begin


class TestKill:
    def runs(self, store: ArtifactStore, change: str) -> list[ArtifactStore]:
        command = [sys.executable, "-c", KILL, root_url(store), change]
        count = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [another(store, f"run{number}") for number in range(1, int(count) + 1)]

    @ON_EACH_KIND_OF_ROOT
    def test_over_another_artifact_it_is_complete_or_absent(self, store: ArtifactStore, tmp_path: Path) -> None:
        found = []
        for run in self.runs(store, "another result"):
            run.clear_abandoned()
            assert [path for path in Path(run.path(INCOMING)).glob("*") if path.is_dir()] == []
            found.append(run.find(FOLDER))
            if found[-1] is not None:
                assert read(run, found[-1], tmp_path / run.run / "found") == FILES
            again = commit(run, rows=5)
            assert run.find(FOLDER) == again
            assert read(run, again, tmp_path / run.run / "again") == FILES
            assert set(contents(run)) == {MANIFEST, *(f"{FOLDER}/{name}" for name in FILES)}
        assert len(found) > 10
        rows = [reference and reference.rows for reference in found]
        assert [rows[0], rows[-1], set(rows)] == [4, 5, {4, None, 5}]

    @pytest.mark.parametrize(
        ("change", "left"),
        [("fewer files", ["part-00000.parquet"]), pytest.param("no files", [], marks=pytest.mark.slow)],
    )
    def test_while_files_are_deleted_it_is_valid(self, local: ArtifactStore, change: str, left: list[str]) -> None:
        reference, runs = commit(local), self.runs(local, change)
        assert len(runs) >= 5
        for run in runs:
            mine = reference.model_copy(update={"uri": f"{run.run}/{FOLDER}"})
            assert restore_artifact(run, mine) == mine
            manifest = run.inspect(run.path(FOLDER))
            begun = manifest.pruned is not None
            assert bool(left_over(run, FOLDER, manifest)) == (begun and run is not runs[-1])
            final = CHANGES[change](run, mine)
            assert restore_artifact(run, mine) == mine
            assert run.find(FOLDER) == final
            finished = run.inspect(run.path(FOLDER))
            assert not left_over(run, FOLDER, finished)
            assert list(finished.files) == left
            assert set(contents(run)) == {MANIFEST, *(f"{FOLDER}/{name}" for name in left)}
            assert moved(run) == []


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@ON_EACH_KIND_OF_ROOT
def test_unfinished_files_of_living_processes_are_left_alone(store: ArtifactStore) -> None:
    with writer_elsewhere(store) as (writer, theirs):
        with store.staging() as ours:
            store.clear_abandoned()
            assert ours.is_dir()
            assert (theirs / "theirs").read_bytes() == b"x"
        writer.kill()
        writer.wait()
        assert theirs.is_dir()
        another(store).clear_abandoned()
        assert not theirs.parent.exists()
