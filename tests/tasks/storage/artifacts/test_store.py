"""Artifacts are complete or absent, damaged files are named and quarantined, and other runs' results are restored."""

import hashlib
import itertools
import json
import math
import shutil
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.restore import restore_artifact
from tasks.storage.artifacts.run_folder import INCOMING
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import dump_checked, load_checked
from tasks.storage.roots import StorageError
from tests.servers import S3Server
from tests.tasks.storage.made_artifacts import (
    FILES,
    FOLDER,
    MANIFEST,
    ON_EACH_KIND_OF_ROOT,
    PART,
    another,
    commit,
    contents,
    flip,
    moved,
    overwrite,
    read,
)


class TestCommit:
    def test_manifest_names_every_file_with_its_sha256(self, store: ArtifactStore, tmp_path: Path) -> None:
        store.require_writable()
        reference = commit(store)
        manifest = contents(store)[MANIFEST]
        described = json.loads(manifest)
        checksum = described.pop("checksum")
        assert checksum == hashlib.sha256(json.dumps(described, indent=1, sort_keys=True).encode()).hexdigest()
        assert described == {
            "digest": "d" * 64,
            "schema_version": 1,
            "rows": 4,
            "seconds": 1.0,
            "metrics": {"reward": 0.5},
            "files": {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()},
        }
        assert reference.sha256 == hashlib.sha256(manifest).hexdigest()
        assert (reference.uri, reference.run, reference.folder) == (f"run/{FOLDER}", "run", FOLDER)
        opened_anew = another(store)
        assert opened_anew.find(FOLDER) == reference
        assert read(opened_anew, reference, tmp_path / "fetched") == FILES
        assert set(contents(store)) == {MANIFEST, *(f"{FOLDER}/{name}" for name in FILES)}

    def test_the_memory_that_a_stage_took_is_kept_where_it_was_measured(self, local: ArtifactStore) -> None:
        commit(local, peak_memory=0)
        assert [found.peak_memory for found in [another(local).find(FOLDER)] if found] == [0]

    def test_nothing_is_left_in_the_staging_area(self, local: ArtifactStore) -> None:
        commit(local)
        local.require_writable()
        with pytest.raises(IsADirectoryError), local.staging() as staged:  # noqa: PT012 - the block is the stage
            (staged / "half").write_bytes(b"x")
            staged.write_bytes(b"x")
        assert {path.name for path in Path(local.path(INCOMING)).iterdir()} == {"lock", "commit.lock"}

        # Metrics that are not finite are refused.
        with local.staging() as staged, pytest.raises(ValueError, match="not JSON compliant"):
            commit_artifact(
                local,
                staged,
                "rewards",
                digest="d",
                schema_version=1,
                rows=1,
                seconds=1.0,
                metrics={"reward": math.nan},
            )
        assert local.find("rewards") is None

    @ON_EACH_KIND_OF_ROOT
    def test_another_result_moves_the_first_to_quarantine(self, store: ArtifactStore) -> None:
        first, second = commit(store, rows=4), commit(store, rows=5)
        assert first.sha256 != second.sha256
        assert store.find(FOLDER) == second
        assert moved(store) == ["another result of the same stage took its place"]
        assert restore_artifact(store, first) == first
        assert store.find(FOLDER) == first

    @ON_EACH_KIND_OF_ROOT
    def test_the_same_result_again_is_the_first(self, store: ArtifactStore, tmp_path: Path) -> None:
        first = commit(store, seconds=1.0)
        assert commit(store, seconds=2.0) == first
        assert moved(store) == []
        flip(store, PART)
        # A process that still has the first reference reads the same result.
        assert commit(store, seconds=3.0) == first == store.find(FOLDER)
        assert ["cut short" in reason for reason in moved(store)] == [True]
        assert restore_artifact(store, first) == first
        assert read(store, first, tmp_path / "fetched") == FILES

    @pytest.mark.parametrize(("rows", "wins"), [(4, True), (5, False)])
    def test_a_writer_that_was_first_meanwhile_is_kept_if_its_result_is_the_same(
        self, remote: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, wins: bool
    ) -> None:
        real, first = remote.filesystem.put_file, list[object]()

        def overtaken(*arguments: object) -> None:
            real(*arguments)
            monkeypatch.setattr(remote.filesystem, "put_file", real)
            # The other one finishes before the manifest of this one is created.
            first.append(commit(another(remote), seconds=9.0, rows=rows))

        monkeypatch.setattr(remote.filesystem, "put_file", overtaken)
        found = commit(remote)
        assert remote.find(FOLDER) == found
        assert (found == first[0]) == wins
        assert ("another result of the same stage took its place" in moved(remote)) != wins
        assert read(remote, found, tmp_path / "fetched") == FILES


DAMAGES: dict[str, Callable[[ArtifactStore, str], object]] = {
    "flipped": flip,
    "emptied": lambda store, name: overwrite(store, name, b""),
    "deleted": lambda store, name: store.filesystem.rm_file(store.path(name)),
}
READERS: dict[str, Callable[..., object]] = {
    "local_files": lambda store, reference, folder: store.local_files(reference, folder),
    "restore_artifact": lambda store, reference, folder: restore_artifact(store, reference),
}


class TestDamage:
    @pytest.mark.parametrize(
        ("store", "place", "damage", "reader"),
        [
            *itertools.product(["local"], [*(f"{FOLDER}/{name}" for name in FILES), MANIFEST], DAMAGES, READERS),
            ("remote", PART, "flipped", "local_files"),
        ],
        indirect=["store"],
    )
    def test_is_named_and_quarantined(
        self, store: ArtifactStore, tmp_path: Path, place: str, damage: str, reader: str
    ) -> None:
        reference = commit(store)
        # In a bucket, the cache has copies of the undamaged files.
        assert read(store, reference, tmp_path / "before") == FILES
        DAMAGES[damage](store, place)
        name = place.removeprefix(f"{FOLDER}/").removeprefix("iteration_000001/")
        with pytest.raises(StaleReferenceError, match=name):
            READERS[reader](store, reference, tmp_path / "fetched")
        assert store.find(FOLDER) is None
        assert contents(store) == {}
        assert [name in reason for reason in moved(store)] == [True]
        again = commit(store)
        assert restore_artifact(store, again) == again
        assert read(store, again, tmp_path / "again") == FILES
        assert len(moved(store)) == 1

    def test_a_manifest_that_names_files_elsewhere_is_not_followed(self, local: ArtifactStore, tmp_path: Path) -> None:
        (tmp_path / "secret").write_bytes(b"secret")
        reference = commit(local)
        described = load_checked(contents(local)[MANIFEST])
        described["files"] = {"../../../../secret": hashlib.sha256(b"secret").hexdigest()}
        overwrite(local, MANIFEST, dump_checked(described))
        assert local.find(FOLDER) is None
        forged = reference.model_copy(update={"sha256": hashlib.sha256(dump_checked(described)).hexdigest()})
        with pytest.raises(StaleReferenceError, match="is not in its folder"):
            local.local_files(forged)


class TestWithout:
    def test_files_of_a_pattern_are_neither_copied_nor_verified(self, store: ArtifactStore, tmp_path: Path) -> None:
        reference = commit(store)
        whole = contents(store)
        flip(store, f"{FOLDER}/nested/part-00001.bin")
        folder = another(store).local_files(reference, tmp_path / "some", without=("nested/*",))
        assert (folder / "part-00000.parquet").read_bytes() == FILES["part-00000.parquet"]
        assert not (tmp_path / "some" / "nested").exists()
        assert contents(store).keys() == whole.keys()
        with pytest.raises(StaleReferenceError, match=r"nested/part-00001\.bin has sha256"):
            another(store).local_files(reference, tmp_path / "all")
        reference = commit(store)
        flip(store, PART)
        with pytest.raises(StaleReferenceError, match=r"part-00000\.parquet has sha256"):
            another(store).local_files(reference, tmp_path / "some", without=("nested/*",))


class TestRestore:
    def test_another_runs_artifact_is_copied(self, store: ArtifactStore, tmp_path: Path) -> None:
        reference, other = commit(store), another(store, "other")
        home = restore_artifact(other, reference)
        assert home == reference.model_copy(update={"uri": f"other/{FOLDER}"})
        store.filesystem.rm(store.path(), recursive=True)
        assert other.find(FOLDER) == home
        assert read(other, home, tmp_path / "fetched") == FILES

    @ON_EACH_KIND_OF_ROOT
    def test_damage_is_healed_from_another_runs_copy(self, store: ArtifactStore, tmp_path: Path) -> None:
        reference, other = commit(store), another(store, "other")
        restore_artifact(other, reference)
        flip(other, PART)
        home = restore_artifact(other, reference)
        assert read(other, home, tmp_path / "fetched") == FILES
        assert ["part-00000.parquet has sha256" in reason for reason in moved(other)] == [True]

    @pytest.mark.parametrize("place", ["quarantine", "earlier run"])
    @ON_EACH_KIND_OF_ROOT
    def test_what_was_moved_away_comes_back_undamaged(self, store: ArtifactStore, tmp_path: Path, place: str) -> None:
        reference = commit(store)

        def move_away() -> None:
            if place == "quarantine":
                store.quarantine([MANIFEST, FOLDER], reason="a test")
            else:
                store.give_to("run~2", [MANIFEST, FOLDER])

        move_away()
        assert store.find(FOLDER) is None
        assert restore_artifact(store, reference) == reference == store.find(FOLDER)
        if place == "earlier run":
            assert store.earlier_runs() == ["run~2"]
            # Of another run it is read where it is.
            store.filesystem.rm(store.path(), recursive=True)
            assert read(another(store, "other"), reference, tmp_path / "fetched") == FILES
            commit(store)
        aside = store.path("quarantine") if place == "quarantine" else f"{store.root}/run~2"
        store.filesystem.rm(aside, recursive=True)
        flip(store, PART)
        move_away()
        with pytest.raises(StaleReferenceError):
            restore_artifact(store, reference)

    def test_the_run_folder_under_another_name_is_enough(self, local: ArtifactStore) -> None:
        reference = commit(local)
        Path(local.root, "elsewhere").mkdir()
        Path(local.path()).rename(Path(local.root, "elsewhere", "renamed"))
        renamed = ArtifactStore(f"{local.root}/elsewhere", "renamed")
        assert restore_artifact(renamed, reference).uri == f"renamed/{FOLDER}"

    def test_another_valid_result_stays_when_the_requested_one_is_nowhere(self, local: ArtifactStore) -> None:
        reference = commit(local, rows=5)
        shutil.rmtree(local.path())
        current = commit(local, rows=4)
        with pytest.raises(StaleReferenceError):
            restore_artifact(local, reference)
        assert local.find(FOLDER) == current


class TestRequests:
    """Requests to a bucket; every one costs time and money."""

    def fetched(self, s3: S3Server, start: int) -> int:
        return len([each for each in s3.requests(start) if each.startswith("GET") and "part-" in each])

    def test_files_are_read_once_and_never_by_their_writer(
        self, remote: ArtifactStore, s3: S3Server, tmp_path: Path
    ) -> None:
        start = len(s3.requests())
        reference = commit(remote)
        assert read(remote, reference, tmp_path / "own") == FILES
        assert restore_artifact(another(remote, "other"), reference).run == "other"
        assert self.fetched(s3, start) == 0
        reader = another(remote)
        reader.files.cache.__init__(tmp_path / "another machine", 2**30)
        for number in range(3):
            assert restore_artifact(reader, reference) == reference
            assert read(reader, reference, tmp_path / str(number)) == FILES
        assert self.fetched(s3, start) == len(FILES)

    def test_a_listing_shows_what_another_machine_just_wrote(self, remote: ArtifactStore) -> None:
        assert remote.filesystem.glob(remote.path("*/*.json")) == []
        commit(another(remote))
        assert remote.filesystem.glob(remote.path("*/*.json")) == [remote.path(MANIFEST)]


class TestRoot:
    @pytest.mark.parametrize("root", ["{}/file/runs", "a\0b", "zip://inside::file:///nowhere.zip", "data:text/plain,x"])
    def test_one_that_cannot_be_written_is_one_error(self, root: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(InputError) as caught:
            ArtifactStore(root.format(tmp_path), "run").require_writable()
        assert caught.value.place == "storage.root"

    def test_a_web_page_is_one_error_and_those_of_a_stage_pass(self, local: ArtifactStore) -> None:
        with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with pytest.raises(InputError, match="501") as caught:
                ArtifactStore(f"http://127.0.0.1:{server.server_port}/runs", "run").require_writable()
            server.shutdown()
        assert caught.value.place == "storage.root"
        with pytest.raises(FileNotFoundError), local.staging():
            Path(local.path("missing")).read_bytes()

    def test_full_disk_is_one_error_and_earlier_artifacts_stay_valid(self, tiny_disk: Path) -> None:
        store = ArtifactStore(str(tiny_disk), "run")
        reference = commit(store)
        with pytest.raises(StorageError, match="full") as caught, store.staging() as staged:
            (staged / "large").write_bytes(bytes(2 << 20))
        assert (caught.value.place, caught.value.value) == ("storage.root", str(tiny_disk))
        assert restore_artifact(store, reference) == reference
        filler = tiny_disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(2 << 20))
        with pytest.raises(StorageError, match="full"):
            commit(store, "iteration_000002/rollouts")
        assert store.find("iteration_000002/rollouts") is None
        filler.unlink()
        second = commit(store, "iteration_000002/rollouts")
        assert store.find("iteration_000002/rollouts") == second
        assert store.find(FOLDER) == reference
