"""An artifact is complete or absent, with several writers and after a kill at any step."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.storage.artifacts.store import INCOMING, PREVIOUS, QUARANTINE, ArtifactStore
from tests.tasks.storage.made_artifacts import (
    FILES,
    FOLDER,
    REPOSITORY,
    another,
    commit,
    contents,
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


def test_writers_at_once_get_the_first_result_or_move_it_to_previous(store: ArtifactStore, tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    commands = [[sys.executable, "-c", AT_ONCE, root_url(store), str(number)] for number in range(2)]
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(subprocess.Popen(command, cwd=REPOSITORY, **pipes)) for command in commands]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(b"go\n")
            writer.stdin.flush()
        written = [writer.communicate(timeout=300)[0].decode().split() for writer in writers]
        assert [writer.returncode for writer in writers] == [0, 0]
    for turn in range(6):
        run = another(store, f"run{turn}")
        found = run.find(FOLDER)
        assert found is not None
        references = [found.model_copy(update={"sha256": each[turn]}) for each in written]
        if turn < 3:
            assert references == [found, found]
            assert read(run, found, tmp_path / str(turn)) == FILES
            assert moved(run) == []
        else:
            assert moved(run) == moved(run, PREVIOUS) == ["another result of the same stage took its place"]
            assert [run.restore_artifact(each) for each in references] == references


# Before which step of a commit, over another artifact, the writer is killed.
STEPS = {
    "settle_folder": "staged",
    "clear_place": "the old one in its place",
    "move_folder": "the old one moved",
    "put_file": "the old one moved",
    "write_manifest": "files in their place",
    "never": "",
}
KILL = """
import os, signal, sys
from tasks.storage.artifacts import store as module
from tests.tasks.storage.made_artifacts import commit

root, steps = sys.argv[1], sys.argv[2:]
for step in steps:
    commit(module.ArtifactStore(root, step), rows=4)
    pid = os.fork()
    if pid == 0:
        owner = module if hasattr(module, step) else module.ArtifactStore
        setattr(owner, step, lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL))
        commit(module.ArtifactStore(root, step), rows=5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (0 if step == "never" else -signal.SIGKILL), step
"""
LOCAL_STEPS = [step for step in STEPS if step != "put_file"]
REMOTE_STEPS = [step for step in STEPS if step not in ("settle_folder", "move_folder")]


def require_complete(store: ArtifactStore, folder: Path) -> bool:
    """Whether an artifact is there: then it is valid; after the next commit the new one is."""
    found = store.find(FOLDER)
    if found is not None:
        assert read(store, found, folder / "found") == FILES
    again = commit(store, rows=5)
    assert (again.rows, store.find(FOLDER)) == (5, again)
    assert read(store, again, folder / "again") == FILES
    assert set(contents(store)) == {f"{FOLDER}.manifest.json", *(f"{FOLDER}/{name}" for name in FILES)}
    return found is not None


class TestKill:
    def test_at_every_step_on_a_disk(self, local: ArtifactStore, tmp_path: Path) -> None:
        subprocess.run([sys.executable, "-c", KILL, local.root, *LOCAL_STEPS], cwd=REPOSITORY, check=True)
        found = {}
        for step in LOCAL_STEPS:
            store = another(local, step)
            left = [path for path in Path(store.path(INCOMING)).iterdir() if path.is_dir()]
            assert bool(left) == (step != "never")
            store.clear_abandoned()
            assert [path for path in left if path.exists()] == []
            found[step] = require_complete(store, tmp_path / step)
            assert len(moved(store, QUARANTINE)) == (1 if step == "write_manifest" else 0)
        assert found == {step: step not in ("move_folder", "write_manifest") for step in LOCAL_STEPS}

    def test_at_every_step_in_a_bucket(self, remote: ArtifactStore, tmp_path: Path) -> None:
        root = f"s3://{remote.root}"
        subprocess.run([sys.executable, "-c", KILL, root, *REMOTE_STEPS], cwd=REPOSITORY, check=True)
        found = {step: require_complete(another(remote, step), tmp_path / step) for step in REMOTE_STEPS}
        assert found == {step: step not in ("put_file", "write_manifest") for step in REMOTE_STEPS}

    @pytest.mark.slow
    def test_before_every_request_to_a_bucket(self, remote: ArtifactStore, tmp_path: Path) -> None:
        command = [sys.executable, "-c", KILL_REQUESTS, f"s3://{remote.root}"]
        numbers = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split()
        found = [require_complete(another(remote, f"run{number}"), tmp_path / number) for number in numbers]
        assert len(found) > 15
        assert found[0]
        assert found[-1]
        assert False in found


KILL_REQUESTS = """
import sys
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.storage.kill_steps import kill_before_each_step
from tests.tasks.storage.made_artifacts import commit

CALLS = ("put_file", "pipe_file", "cp_file", "rm_file", "cat_file", "exists", "info", "find", "glob", "ls")

def prepare(number):
    store = ArtifactStore(sys.argv[1], f"run{number}")
    commit(store, rows=4)
    return [(store.filesystem, name) for name in CALLS], lambda: commit(store, rows=5)

kill_before_each_step(prepare)
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


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
