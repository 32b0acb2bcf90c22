"""A run's folder: artifacts whole or absent, damage noticed by name and set aside, other runs' results brought home."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import fsspec
import pytest

from grpo_core.errors import InputError
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import INCOMING, SET_ASIDE, ArtifactStore
from tasks.storage.filesystem.checked_json import dump_checked, load_checked
from tasks.storage.filesystem.failures import StorageError
from tests.tasks.storage import made_artifacts as artifacts
from tests.tasks.storage.made_artifacts import FILES, FOLDER, commit, flip, kept, reasons

store = artifacts.store


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
        assert store.restore_artifact(first) == first  # still whole where it was set aside
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
        described = load_checked(place.read_bytes())
        described["files"] = {"../../../secret": hashlib.sha256(b"secret").hexdigest()}
        place.write_bytes(dump_checked(described))
        assert store.find(FOLDER) is None
        forged = reference.model_copy(update={"sha256": hashlib.sha256(place.read_bytes()).hexdigest()})
        with pytest.raises(StaleReferenceError, match="is not in its folder"):
            store.local_files(forged)


class TestBringHome:
    def test_another_runs_artifact_is_copied(self, store: ArtifactStore) -> None:
        reference = commit(store)
        other = ArtifactStore(store.root, "other")
        home = other.restore_artifact(reference)
        assert home == reference.model_copy(update={"uri": f"other/{FOLDER}"})
        assert other.find(FOLDER) == home
        shutil.rmtree(store.path())
        local = other.local_files(home)
        assert {name: (local / name).read_bytes() for name in FILES} == FILES

    def test_what_was_set_aside_comes_back(self, store: ArtifactStore) -> None:
        reference = commit(store)
        store.set_aside(["iteration_000001"], reason="the configuration changed")
        assert store.find(FOLDER) is None
        assert store.restore_artifact(reference) == reference
        assert store.find(FOLDER) == reference

    def test_the_run_folder_under_another_name_is_enough(self, store: ArtifactStore) -> None:
        reference = commit(store)
        moved = ArtifactStore(f"{store.root}/elsewhere", "renamed")
        shutil.copytree(store.path(), moved.path())
        assert moved.restore_artifact(reference).uri == f"renamed/{FOLDER}"

    def test_another_whole_result_stays_when_the_asked_one_is_nowhere(self, store: ArtifactStore) -> None:
        reference = commit(store, rows=5)
        shutil.rmtree(store.path())
        present = commit(store, rows=4)
        with pytest.raises(StaleReferenceError):
            store.restore_artifact(reference)
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
        assert other.find(other.restore_artifact(reference).folder) is not None
        remote.filesystem.pipe_file(remote.path(f"{FOLDER}/part-00000.parquet"), b"changed")
        with pytest.raises(StaleReferenceError, match=r"part-00000\.parquet has sha256"):
            remote.local_files(reference, tmp_path / "fetched")
        (note,) = remote.filesystem.glob(remote.path(f"{SET_ASIDE}/*/reason.json"))
        assert "part-00000.parquet" in json.loads(remote.filesystem.cat_file(note))["reason"]
        assert remote.restore_artifact(other.find(FOLDER)).uri == f"run/{FOLDER}"  # type: ignore[arg-type]


class TestPlace:
    def test_root_below_a_file_is_refused_with_the_mend(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(InputError, match=r"storage\.root.*It cannot be written.*choose another"):
            ArtifactStore(str(tmp_path / "file" / "runs"), "run").require_writable()

    @pytest.mark.parametrize("root", ["a\0b", "zip://inside::file:///nowhere.zip", "data:text/plain,x"])
    def test_root_that_nothing_can_be_written_to_is_refused_in_one_message(self, root: str) -> None:
        with pytest.raises(InputError, match=r"storage\.root"):
            ArtifactStore(root, "run").require_writable()

    def test_root_on_a_page_of_the_web_is_refused_in_one_message(self) -> None:
        with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with pytest.raises(InputError, match=r"storage\.root.*does not answer as it should \(501"):
                ArtifactStore(f"http://127.0.0.1:{server.server_port}/runs", "run").require_writable()
            server.shutdown()

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
        assert store.restore_artifact(reference) == reference
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
