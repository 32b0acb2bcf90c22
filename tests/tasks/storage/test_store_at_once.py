"""An artifact is whole or absent, whoever else writes it and whenever its writer is killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.storage.artifacts.store import INCOMING, SET_ASIDE, ArtifactStore
from tests.tasks.storage import made_artifacts as artifacts
from tests.tasks.storage.made_artifacts import FILES, FOLDER, REPOSITORY, commit, kept, reasons

store = artifacts.store

AT_ONCE = """
import os, sys
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.storage.made_artifacts import commit

root, rows = sys.argv[1], [int(each) for each in sys.argv[2:]]
children = []
for number, count in enumerate(rows):
    pid = os.fork()
    if pid == 0:
        for turn in range(10):
            commit(ArtifactStore(root, f"run{turn}"), seconds=float(number), rows=count)
        os._exit(0)
    children.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


class TestWritersAtOnce:
    def write(self, root: str, *rows: int) -> list[ArtifactStore]:
        subprocess.run([sys.executable, "-c", AT_ONCE, root, *map(str, rows)], cwd=REPOSITORY, check=True)
        return [ArtifactStore(root, f"run{turn}") for turn in range(10)]

    def test_the_first_stands_where_all_have_the_same_result(self, tmp_path: Path) -> None:
        for store in self.write(str(tmp_path), 4, 4, 4):
            found = store.find(FOLDER)
            assert found is not None
            assert reasons(store) == []

    def test_each_other_result_is_set_aside_whole(self, tmp_path: Path) -> None:
        for store in self.write(str(tmp_path), 4, 5, 6):
            found = store.find(FOLDER)
            assert found is not None
            assert reasons(store) == ["another result of the same stage took its place"] * 2
            kept_aside = [
                json.loads(path.read_text())["rows"] for path in Path(store.path(SET_ASIDE)).rglob("*.manifest.json")
            ]
            assert sorted([found.rows, *kept_aside]) == [4, 5, 6]


KILL_POINTS = ("staged", "half-moved", "moved", "manifest half-written", "committed")
KILL = """
import os, signal, sys
from tasks.storage.artifacts import commit as module
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.storage.made_artifacts import commit
from tests.tasks.storage.test_store_at_once import KILL_POINTS

def kill(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def set_up(point):
    real_write, real_move = module.write_whole, module.move_folder
    if point == "staged":
        module.settle_folder = kill
    if point == "half-moved":
        module.move_folder = lambda staged, target: (staged.joinpath("part-00000.parquet").unlink(), kill())
    if point == "moved":
        module.move_folder = lambda *a: (real_move(*a), kill())
    if point == "manifest half-written":
        def half(filesystem, path, content, *, scratch):
            (scratch / "half").write_bytes(content[:10])
            kill()
        module.write_whole = half
    if point == "committed":
        module.write_whole = lambda *a, **k: (real_write(*a, **k), kill())

for point in KILL_POINTS:
    pid = os.fork()
    if pid == 0:
        set_up(point)
        commit(ArtifactStore(sys.argv[1], point))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A root with one run for each point that its writer was killed at."""
    root = str(tmp_path_factory.mktemp("killed"))
    subprocess.run([sys.executable, "-c", KILL, root], cwd=REPOSITORY, check=True)
    return root


class TestKill:
    @pytest.mark.parametrize("point", KILL_POINTS)
    def test_kill_leaves_a_whole_artifact_or_none(self, killed: str, point: str) -> None:
        store = ArtifactStore(killed, point)
        assert any(path.is_dir() for path in Path(store.path(INCOMING)).iterdir())
        found = store.find(FOLDER)
        assert (found is not None) == (point == "committed")
        store.clear_abandoned()
        assert [path for path in Path(store.path(INCOMING)).iterdir() if path.is_dir()] == []
        again = commit(store)
        assert store.find(FOLDER) == again
        if point in ("moved", "manifest half-written"):
            assert ["cut short" in reason for reason in reasons(store)] == [True]
        assert {name for name in kept(store) if not name.startswith((SET_ASIDE, INCOMING))} == {
            f"{FOLDER}.manifest.json",
            *(f"{FOLDER}/{name}" for name in FILES),
        }

    def test_folders_of_living_processes_are_left_alone(self, store: ArtifactStore) -> None:
        script = (
            "import sys; from tasks.storage.artifacts.store import ArtifactStore\n"
            "with ArtifactStore(sys.argv[1], 'run').staging() as staged:\n"
            "    (staged / 'other').write_bytes(b'x'); print(staged, flush=True); sys.stdin.read()\n"
        )
        command = [sys.executable, "-c", script, store.root]
        with subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            theirs = Path(other.stdout.readline().strip())
            with store.staging() as ours:
                store.clear_abandoned()
                assert ours.is_dir()
                assert (theirs / "other").read_bytes() == b"x"
            os.kill(other.pid, signal.SIGKILL)
            other.wait()
        assert theirs.is_dir()
        store.clear_abandoned()
        assert not theirs.parent.exists()
