"""A run's folder: artifacts whole or absent, damage noticed by name and set aside, other runs' results brought home."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from grpo_core.errors import InputError
from tasks.storage.failures import StorageError
from tasks.storage.manifest import opened, sealed
from tasks.storage.reference import ArtifactRef, StaleReferenceError
from tasks.storage.store import INCOMING, SET_ASIDE, ArtifactStore

FOLDER = "iteration_000001/rollouts"
FILES = {"part-00000.parquet": b"first part", "nested/part-00001.bin": bytes(range(256))}
REPOSITORY = Path(__file__).resolve().parents[3]


def commit(store: ArtifactStore, folder: str = FOLDER, *, seconds: float = 1.0, rows: int = 4) -> ArtifactRef:
    with store.staging() as staged:
        for name, content in FILES.items():
            (staged / name).parent.mkdir(exist_ok=True)
            (staged / name).write_bytes(content)
        return store.commit(
            staged, folder, digest="d" * 64, schema_version=1, rows=rows, seconds=seconds, metrics={"reward": 0.5}
        )


def reasons(store: ArtifactStore) -> list[str]:
    notes = sorted(Path(store.path(SET_ASIDE)).glob("*/reason.json"))
    return [json.loads(note.read_text())["reason"] for note in notes]


def kept(store: ArtifactStore) -> dict[str, bytes]:
    top = Path(store.path())
    return {path.relative_to(top).as_posix(): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path), "run")


class TestCommit:
    def test_manifest_names_every_file_with_its_sha256(self, store: ArtifactStore) -> None:
        reference = commit(store)
        manifest = Path(store.path(f"{FOLDER}.manifest.json")).read_bytes()
        described = json.loads(manifest)
        assert (
            described.pop("seal")
            == hashlib.sha256(json.dumps(described, indent=1, sort_keys=True).encode()).hexdigest()
        )
        assert described == {
            "digest": "d" * 64,
            "schema_version": 1,
            "rows": 4,
            "seconds": 1.0,
            "metrics": {"reward": 0.5},
            "files": {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()},
        }
        assert reference.sha256 == hashlib.sha256(manifest).hexdigest()
        assert reference.uri == f"run/{FOLDER}"
        assert (reference.run, reference.folder) == ("run", FOLDER)
        assert store.find(FOLDER) == reference
        local = store.local_files(reference)
        assert {name: (local / name).read_bytes() for name in FILES} == FILES

    def test_nothing_is_left_in_the_staging_area(self, store: ArtifactStore) -> None:
        commit(store)
        assert [path for path in Path(store.path(INCOMING)).iterdir() if path.is_dir()] == []

    def test_failing_stage_leaves_no_artifact_and_no_staged_file(self, store: ArtifactStore) -> None:
        with pytest.raises(IsADirectoryError), store.staging() as staged:  # noqa: PT012 - the block is the stage
            (staged / "half").write_bytes(b"x")
            staged.write_bytes(b"x")
        assert set(kept(store)) == {f"{INCOMING}/lock"}

    def test_metric_that_is_not_finite_is_refused(self, store: ArtifactStore) -> None:
        with store.staging() as staged, pytest.raises(ValueError, match="not JSON compliant"):
            store.commit(
                staged, FOLDER, digest="d", schema_version=1, rows=1, seconds=1.0, metrics={"reward": float("nan")}
            )
        assert store.find(FOLDER) is None

    def test_second_result_sets_the_first_aside(self, store: ArtifactStore) -> None:
        first = commit(store, rows=4)
        second = commit(store, rows=5)
        assert first.sha256 != second.sha256
        assert store.find(FOLDER) == second
        assert reasons(store) == ["another result of the same stage took its place"]
        assert store.bring_home(first) == first  # still whole where it was set aside
        assert store.find(FOLDER) == first

    def test_the_same_result_again_is_the_one_that_stands(self, store: ArtifactStore) -> None:
        first = commit(store, seconds=1.0)
        assert commit(store, seconds=2.0) == first
        assert reasons(store) == []
        flip(Path(store.path(f"{FOLDER}/part-00000.parquet")))
        third = commit(store, seconds=3.0)
        assert third.seconds == 3.0
        assert store.find(FOLDER) == third
        assert ["cut short" in reason for reason in reasons(store)] == [True]

    def test_manifest_that_names_files_elsewhere_is_not_followed(self, store: ArtifactStore, tmp_path: Path) -> None:
        (tmp_path / "secret").write_bytes(b"secret")
        place = Path(store.path(f"{FOLDER}.manifest.json"))
        reference = commit(store)
        described = opened(place.read_bytes())
        described["files"] = {"../../../secret": hashlib.sha256(b"secret").hexdigest()}
        place.write_bytes(sealed(described))
        assert store.find(FOLDER) is None
        forged = reference.model_copy(update={"sha256": hashlib.sha256(place.read_bytes()).hexdigest()})
        with pytest.raises(StaleReferenceError, match="is not in its folder"):
            store.local_files(forged)


AT_ONCE = """
import os, sys
from tasks.storage.store import ArtifactStore
from tests.tasks.storage.test_store import commit

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
from tasks.storage import committing as module
from tasks.storage.store import ArtifactStore
from tests.tasks.storage.test_store import KILL_POINTS, commit

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
            "import sys; from tasks.storage.store import ArtifactStore\n"
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


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "flipped": flip,
    "truncated": truncate,
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
}
PLACES = [*(f"{FOLDER}/{name}" for name in FILES), f"{FOLDER}.manifest.json"]


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES)
    @pytest.mark.parametrize("place", PLACES)
    def test_reader_names_the_file_and_sets_the_artifact_aside(
        self, store: ArtifactStore, place: str, damage: str
    ) -> None:
        reference = commit(store)
        DAMAGES[damage](Path(store.path(place)))
        name = place.removeprefix(f"{FOLDER}/").rsplit("iteration_000001/", 1)[-1]
        with pytest.raises(StaleReferenceError, match=name):
            store.local_files(reference)
        assert store.find(FOLDER) is None
        assert [name in reason for reason in reasons(store)] == [True]
        assert not Path(store.path(FOLDER)).exists()

    @pytest.mark.parametrize("damage", DAMAGES)
    @pytest.mark.parametrize("place", PLACES)
    def test_damaged_artifact_does_not_come_home(self, store: ArtifactStore, place: str, damage: str) -> None:
        reference = commit(store)
        DAMAGES[damage](Path(store.path(place)))
        name = place.removeprefix(f"{FOLDER}/").rsplit("iteration_000001/", 1)[-1]
        with pytest.raises(StaleReferenceError, match=name):
            store.bring_home(reference)
        assert [name in reason for reason in reasons(store)] == [True]
        again = commit(store)
        assert store.bring_home(again) == again
        assert len(reasons(store)) == 1  # the damaged one was already out of the way

    def test_every_flipped_bit_of_a_manifest_is_noticed(self, store: ArtifactStore) -> None:
        reference = commit(store)
        manifest = Path(store.path(f"{FOLDER}.manifest.json"))
        whole = manifest.read_bytes()
        for position in range(len(whole)):
            changed = bytearray(whole)
            changed[position] ^= 1 << (position % 8)
            manifest.write_bytes(changed)
            assert store.find(FOLDER) is None
        manifest.write_bytes(whole)
        assert store.find(FOLDER) == reference

    def test_damaged_artifact_is_healed_from_another_runs_copy(self, store: ArtifactStore) -> None:
        reference = commit(store)
        other = ArtifactStore(store.root, "other")
        other.bring_home(reference)
        flip(Path(other.path(f"{FOLDER}/part-00000.parquet")))
        home = other.bring_home(reference)
        assert home.uri == f"other/{FOLDER}"
        assert Path(other.path(f"{FOLDER}/part-00000.parquet")).read_bytes() == FILES["part-00000.parquet"]
        assert ["part-00000.parquet has sha256" in reason for reason in reasons(other)] == [True]


class TestBringHome:
    def test_another_runs_artifact_is_copied(self, store: ArtifactStore) -> None:
        reference = commit(store)
        other = ArtifactStore(store.root, "other")
        home = other.bring_home(reference)
        assert home == reference.model_copy(update={"uri": f"other/{FOLDER}"})
        assert other.find(FOLDER) == home
        shutil.rmtree(store.path())
        local = other.local_files(home)
        assert {name: (local / name).read_bytes() for name in FILES} == FILES

    def test_what_was_set_aside_comes_back(self, store: ArtifactStore) -> None:
        reference = commit(store)
        store.set_aside(["iteration_000001"], reason="the configuration changed")
        assert store.find(FOLDER) is None
        assert store.bring_home(reference) == reference
        assert store.find(FOLDER) == reference

    def test_the_run_folder_under_another_name_is_enough(self, store: ArtifactStore) -> None:
        reference = commit(store)
        moved = ArtifactStore(f"{store.root}/elsewhere", "renamed")
        shutil.copytree(store.path(), moved.path())
        assert moved.bring_home(reference).uri == f"renamed/{FOLDER}"

    def test_another_whole_result_stays_when_the_asked_one_is_nowhere(self, store: ArtifactStore) -> None:
        reference = commit(store, rows=5)
        shutil.rmtree(store.path())
        present = commit(store, rows=4)
        with pytest.raises(StaleReferenceError):
            store.bring_home(reference)
        assert store.find(FOLDER) == present


class TestRemoteRoot:
    @pytest.fixture
    def remote(self) -> Iterator[ArtifactStore]:
        yield ArtifactStore("memory://bucket/runs", "run")
        memory = fsspec.filesystem("memory")
        if memory.exists("/bucket"):
            memory.rm("/bucket", recursive=True)

    def test_artifact_is_written_verified_and_fetched(self, remote: ArtifactStore, tmp_path: Path) -> None:
        remote.require_writable()
        reference = commit(remote)
        assert remote.find(FOLDER) == reference
        local = remote.local_files(reference, tmp_path / "fetched")
        assert {name: (local / name).read_bytes() for name in FILES} == FILES

    def test_damage_is_set_aside_and_other_runs_are_copied(self, remote: ArtifactStore, tmp_path: Path) -> None:
        reference = commit(remote)
        other = ArtifactStore("memory://bucket/runs", "other")
        assert other.find(other.bring_home(reference).folder) is not None
        remote.filesystem.pipe_file(remote.path(f"{FOLDER}/part-00000.parquet"), b"changed")
        with pytest.raises(StaleReferenceError, match=r"part-00000\.parquet has sha256"):
            remote.local_files(reference, tmp_path / "fetched")
        (note,) = remote.filesystem.glob(remote.path(f"{SET_ASIDE}/*/reason.json"))
        assert "part-00000.parquet" in json.loads(remote.filesystem.cat_file(note))["reason"]
        assert remote.bring_home(other.find(FOLDER)).uri == f"run/{FOLDER}"  # type: ignore[arg-type]


class TestPlace:
    def test_root_below_a_file_is_refused_with_the_mend(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(InputError, match=r"storage\.root.*It cannot be written.*choose another"):
            ArtifactStore(str(tmp_path / "file" / "runs"), "run").require_writable()

    def test_probe_leaves_nothing_behind(self, store: ArtifactStore) -> None:
        store.require_writable()
        assert set(kept(store)) == {f"{INCOMING}/lock"}

    def test_full_disk_is_one_message_and_earlier_artifacts_stay_whole(self, tiny_disk: Path) -> None:
        store = ArtifactStore(str(tiny_disk), "run")
        reference = commit(store)
        with (
            pytest.raises(StorageError, match=r"storage\.root.*the disk is full.*start again"),
            store.staging() as staged,
        ):
            (staged / "large").write_bytes(bytes(2 << 20))
        assert store.bring_home(reference) == reference
        filler = tiny_disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(2 << 20))
        with pytest.raises(StorageError, match="the disk is full"):
            commit(store, "iteration_000002/rollouts")
        assert store.find("iteration_000002/rollouts") is None
        filler.unlink()
        second = commit(store, "iteration_000002/rollouts")
        assert store.find("iteration_000002/rollouts") == second
        assert store.find(FOLDER) == reference

    def test_other_errors_of_a_stage_pass_as_they_are(self, store: ArtifactStore) -> None:
        with pytest.raises(FileNotFoundError), store.staging():
            (store_missing := Path(store.path("missing"))).read_bytes()
        assert not store_missing.exists()
