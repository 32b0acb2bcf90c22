"""A run in a bucket, on a real server of the S3 protocol."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.loader import read_config
from configs.placement_sections import StorageSection
from flows.inputs import require_inputs
from grpo_core.errors import InputError, InputErrors
from tasks.placing.faults import Fault, fault_of
from tasks.storage import artifact_files, committing, roots
from tasks.storage.artifact_files import s3_tag
from tasks.storage.codec import decode_reference, encode_reference
from tasks.storage.configured import open_store
from tasks.storage.failures import StorageError, UnreachableStorageError
from tasks.storage.records import StageRecords
from tasks.storage.reference import StaleReferenceError
from tasks.storage.store import SET_ASIDE, ArtifactStore, use_store
from tests.s3_server import S3Server, forget_clients

from .test_store import FILES, FOLDER, REPOSITORY, commit

PART_0 = f"{FOLDER}/part-00000.parquet"


@pytest.fixture
def store(bucket: str) -> ArtifactStore:
    return ArtifactStore(f"{bucket}/runs", "run")


def reasons(store: ArtifactStore) -> list[str]:
    notes = sorted(store.filesystem.glob(store.path(f"{SET_ASIDE}/*/reason.json")))
    return [json.loads(store.filesystem.cat_file(note))["reason"] for note in notes]


def read(store: ArtifactStore, folder: Path, reference: Any) -> dict[str, bytes]:
    local = store.local_files(reference, folder)
    return {path.relative_to(local).as_posix(): path.read_bytes() for path in local.rglob("*") if path.is_file()}


@contextlib.contextmanager
def environment(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> Iterator[None]:
    with monkeypatch.context() as changed:
        for name, value in values.items():
            changed.setenv(name, value)
        forget_clients()
        yield
    forget_clients()


class TestArtifacts:
    def test_artifact_is_written_found_and_read(self, store: ArtifactStore, tmp_path: Path) -> None:
        store.require_writable()
        reference = commit(store)
        other_machine = ArtifactStore(f"s3://{store.root}", "run")
        assert other_machine.find(FOLDER) == reference
        assert read(other_machine, tmp_path / "fetched", reference) == FILES
        names = sorted(store.filesystem.find(store.path()))
        kept = sorted([*(f"{FOLDER}/{name}" for name in FILES), f"{FOLDER}.manifest.json"])
        assert names == [store.path(name) for name in kept]

    def test_listing_shows_what_another_machine_wrote_a_moment_ago(self, store: ArtifactStore) -> None:
        assert store.filesystem.glob(store.path("*/*.json")) == []
        commit(ArtifactStore(f"s3://{store.root}", "run"))
        (found,) = store.filesystem.glob(store.path("*/*.json"))
        assert found.endswith("rollouts.manifest.json")

    @pytest.mark.parametrize("damage", ["changed", "deleted"])
    def test_damage_is_noticed_though_the_cache_holds_the_file(
        self, store: ArtifactStore, tmp_path: Path, damage: str
    ) -> None:
        reference = commit(store)
        assert read(store, tmp_path / "1", reference) == FILES
        if damage == "changed":
            store.filesystem.pipe_file(store.path(PART_0), b"FIRST PART")
        else:
            store.filesystem.rm_file(store.path(PART_0))
        with pytest.raises(StaleReferenceError, match=r"part-00000\.parquet (has sha256|is missing)"):
            store.local_files(reference, tmp_path / "2")
        assert ["part-00000.parquet" in reason for reason in reasons(store)] == [True]
        assert store.find(FOLDER) is None
        again = commit(store)
        assert read(store, tmp_path / "3", again) == FILES

    def test_another_runs_artifact_comes_home_without_being_read(
        self, store: ArtifactStore, s3: S3Server, tmp_path: Path
    ) -> None:
        reference = commit(store)
        other, before = ArtifactStore(f"s3://{store.root}", "other"), len(s3.requests())
        home = other.bring_home(reference)
        assert home == reference.model_copy(update={"uri": f"other/{FOLDER}"})
        assert other.find(FOLDER) == home
        assert [each for each in s3.requests(before) if each.startswith("GET") and "part-" in each] == []
        assert read(other, tmp_path / "fetched", home) == FILES

    def test_a_file_in_parts_has_the_tag_that_is_computed(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        smallest = 5 * 2**20
        for module in (artifact_files, committing):
            monkeypatch.setattr(module, "PART", smallest)
        with store.staging() as staged:
            with (staged / "weights").open("wb") as stream:
                stream.truncate(2 * smallest + 5)
            expected = s3_tag(staged / "weights")
            store.commit(staged, "policies/000001", digest="d", schema_version=1, rows=0, seconds=0.0, metrics={})
        found = store.filesystem.info(store.path("policies/000001/weights"))
        assert found["ETag"].strip('"') == expected
        assert expected.endswith("-3")


class TestCache:
    def test_a_file_is_read_from_the_bucket_once(self, store: ArtifactStore, s3: S3Server, tmp_path: Path) -> None:
        reference = commit(store)
        other = ArtifactStore(f"s3://{store.root}", "run")
        assert other.files.cache is not None
        other.files.cache.folder = tmp_path / "another machine"
        before = len(s3.requests())
        assert other.bring_home(reference) == reference
        for number in range(3):
            assert read(other, tmp_path / str(number), reference) == FILES
        assert other.bring_home(reference) == reference
        fetched = [each for each in s3.requests(before) if each.startswith("GET") and FOLDER in each]
        assert len([each for each in fetched if "part-" in each]) == len(FILES)

    def test_its_writer_does_not_read_it_at_all(self, store: ArtifactStore, s3: S3Server, tmp_path: Path) -> None:
        before = len(s3.requests())
        assert read(store, tmp_path / "fetched", commit(store)) == FILES
        assert [each for each in s3.requests(before) if each.startswith("GET") and "part-" in each] == []


TWO_WRITERS = """
import sys
from tasks.storage import committing
from tasks.storage.store import ArtifactStore
from tests.tasks.storage.test_store import commit

root, seconds, rows = sys.argv[1:]
real = committing._write

def waiting(*arguments, **options):
    if not waiting.once:
        waiting.once = True
        print("ready", flush=True)
        sys.stdin.readline()
    return real(*arguments, **options)

waiting.once = False
committing._write = waiting
print(commit(ArtifactStore(root, "run"), seconds=float(seconds), rows=int(rows)).sha256, flush=True)
"""


class TestTwoWriters:
    def write_at_once(self, root: str, rows: tuple[int, int]) -> tuple[str, str]:
        """Two processes that have both seen the place empty; the sha256 that each comes back with."""
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-c", TWO_WRITERS, root, str(number), str(count)],
                        cwd=REPOSITORY,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                for number, count in enumerate(rows)
            ]
            for writer in writers:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "ready\n"
            told = [writer.communicate("go\n", timeout=120)[0].strip() for writer in _both_started(writers)]
            assert [writer.wait() for writer in writers] == [0, 0]
        return told[0], told[1]

    def test_both_come_back_with_the_one_that_stands(self, store: ArtifactStore, tmp_path: Path) -> None:
        told = self.write_at_once(f"s3://{store.root}", (4, 4))
        found = store.find(FOLDER)
        assert found is not None
        assert found.sha256 in told
        for sha256 in told:
            reference = found.model_copy(update={"sha256": sha256})
            assert store.bring_home(reference) == reference
            assert read(store, tmp_path / sha256, reference) == FILES

    @pytest.mark.slow
    def test_another_result_sets_the_first_aside(self, store: ArtifactStore, tmp_path: Path) -> None:
        told = self.write_at_once(f"s3://{store.root}", (4, 5))
        found = store.find(FOLDER)
        assert found is not None
        assert found.sha256 in told
        assert told[0] != told[1]
        assert read(store, tmp_path / "fetched", found) == FILES


def _both_started(writers: list["subprocess.Popen[str]"]) -> list["subprocess.Popen[str]"]:
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    return writers


class TestSlowWriter:
    def test_files_that_another_put_over_them_are_written_again(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A worker that was thought dead puts its file there just when the manifest has been made."""
        real = committing.create_manifest

        def overtaken(store: ArtifactStore, path: str, manifest: Any) -> bool:
            made = real(store, path, manifest)
            store.filesystem.pipe_file(store.path(PART_0), b"another's")
            return made

        monkeypatch.setattr(committing, "create_manifest", overtaken)
        reference = commit(store)
        assert store.filesystem.cat_file(store.path(PART_0)) == FILES["part-00000.parquet"]
        assert read(store, tmp_path / "fetched", reference) == FILES

    def test_an_artifact_that_it_damaged_is_mended_and_its_reference_stays_right(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        reference = commit(store, seconds=1.0)
        store.filesystem.pipe_file(store.path(PART_0), b"another's")
        mended = commit(store, seconds=2.0)
        assert mended.sha256 != reference.sha256
        assert store.bring_home(reference) == reference
        assert read(store, tmp_path / "fetched", reference) == FILES
        assert reasons(store) == []


SWEEP = """
import os, signal, sys
from tasks.storage.store import ArtifactStore
from tests.tasks.storage.test_store import FOLDER, commit

root, first, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
CALLS = ("put_file", "pipe_file", "cp_file", "rm_file", "cat_file", "exists", "info", "find", "glob")

def count_down(store, number):
    for name in CALLS:
        real = getattr(store.filesystem, name)
        def counted(*arguments, real=real, **options):
            count_down.left -= 1
            if count_down.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        setattr(store.filesystem, name, counted)
    count_down.left = number

number = first
while True:
    pid = os.fork()
    if pid == 0:
        store = ArtifactStore(root, f"run{number}")
        commit(store, rows=4)
        count_down(store, number)
        commit(store, rows=5)
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    print(number, killed, flush=True)
    if not killed:
        break
    number += step
"""


def sweep(root: str, first: int, step: int) -> list[int]:
    """Numbers of the requests before which a commit over another artifact was killed, each in a run of its own."""
    command = [sys.executable, "-c", SWEEP, root, str(first), str(step)]
    told = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in told if line.endswith("True")]


class TestKill:
    def require_whole(self, root: str, number: int, folder: Path) -> bool:
        """After a kill the one artifact or the other is whole, or none is there and the first comes home."""
        store = ArtifactStore(root, f"run{number}")
        found = store.find(FOLDER)
        if found is not None:
            assert read(store, folder / f"{number}", found) == FILES
        first = store.find(FOLDER)
        again = commit(store, rows=5)
        assert read(store, folder / f"{number}-again", again) == FILES
        assert again.rows == 5
        return first is not None

    def test_kill_leaves_a_whole_artifact_or_none(self, store: ArtifactStore, tmp_path: Path) -> None:
        root = f"s3://{store.root}"
        found = [self.require_whole(root, number, tmp_path) for number in sweep(root, 4, 9)]
        assert True in found
        assert False in found

    @pytest.mark.slow
    def test_kill_before_every_single_request(self, store: ArtifactStore, tmp_path: Path) -> None:
        root = f"s3://{store.root}"
        found = [self.require_whole(root, number, tmp_path) for number in sweep(root, 1, 1)]
        assert len(found) > 15
        assert found[0]
        assert found[-1]


class TestRefusals:
    def refusal(self, root: str) -> InputError:
        started = time.monotonic()
        with pytest.raises(InputError) as caught:
            ArtifactStore(root, "run").require_writable()
        assert time.monotonic() - started < 30
        return caught.value

    def test_absent_bucket(self, bucket: str) -> None:
        error = self.refusal(f"{bucket}-absent/runs")
        assert "There is no such bucket; make it" in error.mend
        assert error.value == f"{bucket}-absent/runs"

    @pytest.mark.parametrize(
        "actions",
        [
            ("s3:ListBucket", "s3:GetObject", "s3:DeleteObject"),
            ("s3:ListBucket", "s3:PutObject", "s3:DeleteObject"),
            ("s3:PutObject", "s3:GetObject", "s3:DeleteObject"),
            ("s3:ListBucket", "s3:PutObject", "s3:GetObject"),
        ],
        ids=["no writing", "no reading", "no listing", "no removing"],
    )
    def test_missing_rights(
        self, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, actions: tuple[str, ...]
    ) -> None:
        with environment(monkeypatch, s3.make_user(*actions)), s3.enforcing_rights():
            error = self.refusal(f"{bucket}/runs")
        assert "list, read, write and delete objects" in error.mend
        assert "AWS_PROFILE" in error.mend

    def test_wrong_keys(self, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = {"AWS_ACCESS_KEY_ID": "AKIAWRONG", "AWS_SECRET_ACCESS_KEY": "hidden-secret"}
        with environment(monkeypatch, wrong), s3.enforcing_rights():
            error = self.refusal(f"{bucket}/runs")
        assert "The bucket refuses" in error.mend
        assert "hidden-secret" not in str(error)

    def test_no_keys(self, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        forget_clients()
        assert "No credentials were found" in self.refusal(f"{bucket}/runs").mend

    def test_nobody_at_the_address(self, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with environment(monkeypatch, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}):
            assert "look at AWS_ENDPOINT_URL" in self.refusal(f"{bucket}/runs").mend

    def test_address_that_does_not_answer(self, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(roots, "LOOK", {"connect_timeout": 1, "read_timeout": 1})
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with environment(monkeypatch, {"AWS_ENDPOINT_URL": address}):
                assert "does not answer as it should" in self.refusal(f"{bucket}/runs").mend


class TestConfiguration:
    def problems(self, bucket: str, **storage: object) -> list[str]:
        config = read_config(REPOSITORY / "configs/tiny.yaml", [f"storage.root={bucket}/runs", "run.name=run"])
        section = config.storage.model_copy(update=storage)
        with pytest.raises(InputErrors) as caught:
            require_inputs(config.model_copy(update={"storage": section}))
        return [str(error) for error in caught.value.errors]

    def test_a_wrong_root_is_told_before_the_work_begins(self, bucket: str, tmp_path: Path) -> None:
        (told,) = self.problems(bucket, root="s3://key:secret@bucket/runs")
        assert told.startswith("storage.root: got 's3://***@bucket/runs'.")
        (told,) = self.problems(bucket, root=f"{bucket}-absent/runs")
        assert "There is no such bucket" in told
        (tmp_path / "file").write_text("")
        (told,) = self.problems(bucket, cache_dir=str(tmp_path / "file"))
        assert told.startswith("storage.cache_dir")

    def test_the_cache_is_the_one_that_is_asked_for(self, bucket: str, tmp_path: Path) -> None:
        section = StorageSection(root=bucket, cache_dir=str(tmp_path / "copies"), cache_gib=0.5)
        store = open_store(section, "run")
        reference = commit(store)
        assert read(store, tmp_path / "fetched", reference) == FILES
        assert len([path for path in (tmp_path / "copies" / "contents").rglob("*") if path.is_file()]) == len(FILES)
        assert store.files.cache is not None
        assert store.files.cache.limit == 2**29
        assert open_store(StorageSection(root=str(tmp_path)), "run").files.cache is None


class TestFailuresInARun:
    def test_rights_that_are_lost_are_one_message(
        self, s3: S3Server, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        reference = commit(store)
        with environment(monkeypatch, s3.make_user("s3:ListBucket")), s3.enforcing_rights():
            without = ArtifactStore(f"s3://{store.root}", "run")
            for attempt in (
                lambda: commit(without, "iteration_000002/rollouts"),
                lambda: without.find(FOLDER),
                lambda: without.local_files(reference, tmp_path / "none"),
                lambda: without.bring_home(reference),
                lambda: without.write_file("run.json", b"{}"),
                lambda: without.read_file("run.json"),
                lambda: without.set_aside(["iteration_000001"], reason="a test"),
            ):
                with pytest.raises(StorageError, match=r"storage\.root.*the bucket refuses.*start again") as caught:
                    attempt()
                assert fault_of(caught.value) is None
        assert store.find(FOLDER) == reference

    def test_stage_does_not_run_again_while_a_bucket_does_not_say_whether_it_has_run(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_store(store)
        value = encode_reference(commit(store))
        real, calls = store.filesystem.cat_file, []

        def unreachable(*arguments: Any, **options: Any) -> bytes:
            calls.append(arguments)
            raise ConnectionError("connection reset by peer")

        monkeypatch.setattr(store.filesystem, "cat_file", unreachable)
        for reading in (lambda: decode_reference(value), lambda: StageRecords().read_path("collect-rollouts-1")):
            with pytest.raises(UnreachableStorageError) as caught:
                reading()
            assert fault_of(caught.value) is Fault.STORAGE
            with pytest.raises(UnreachableStorageError, match="not known whether this stage has been done"):
                commit(store, "iteration_000002/rollouts")
            monkeypatch.setattr(store.filesystem, "cat_file", real)
            with contextlib.suppress(StaleReferenceError):
                reading()
            assert store.unread == set()
            monkeypatch.setattr(store.filesystem, "cat_file", unreachable)
        assert len(calls) == 2

    def test_a_filesystem_without_conditional_writes_is_looked_at_twice(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        real = store.filesystem.pipe_file

        def unconditional(path: str, content: bytes, mode: str = "overwrite") -> None:
            if mode == "create":
                raise NotImplementedError
            real(path, content)

        monkeypatch.setattr(store.filesystem, "pipe_file", unconditional)
        first = commit(store)
        assert commit(store, seconds=2.0) == first
        assert read(store, tmp_path / "fetched", first) == FILES


def test_without_its_package_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from grpo_core.errors import InputError\n"
        "from tasks.storage.store import ArtifactStore\n"
        "try:\n    ArtifactStore('s3://bucket/runs', 'run')\n"
        "except InputError as error:\n    print(error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, check=True, capture_output=True, text=True, env={**os.environ}
    )
    assert "storage.root: got 's3://bucket/runs'. Install s3fs, which the extra s3" in told.stdout


@pytest.mark.parametrize(
    ("root", "shown"),
    [
        ("s3://AKIAEXAMPLE:abc/def+secret@bucket/runs", "s3://***@bucket/runs"),
        ("s3://AKIAEXAMPLE@bucket", "s3://***@bucket"),
        ("sftp://user:secret@host:22/runs", "sftp://***@host:22/runs"),
        ("simplecache::s3://k:secret@bucket/runs", "simplecache::s3://***@bucket/runs"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(root: str, shown: str) -> None:
    with pytest.raises(InputError, match="leave them out of the URL") as caught:
        ArtifactStore(root, "run")
    assert caught.value.value == shown
    assert "secret" not in str(caught.value).replace("AWS_SECRET_ACCESS_KEY", "")
    assert "AKIAEXAMPLE" not in str(caught.value)


def test_other_signs_in_a_url_are_no_credentials(tmp_path: Path) -> None:
    assert ArtifactStore(f"file://{tmp_path}/a@b:c", "run").root == f"{tmp_path}/a@b:c"
    assert ArtifactStore("memory://bucket:80/a@b", "run").root.endswith("bucket:80/a@b")
