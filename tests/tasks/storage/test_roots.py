"""A root: no secret in its URL or in a message, and a lock only where a file is created once."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.cached import SimpleCacheFileSystem, WholeFileCacheFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from configs.loader import read_config
from flows.preflight.inputs import check_inputs
from grpo_core.errors import InputError
from tasks.execution.errors import Retryable, retryable_kind
from tasks.storage import roots
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.restore import restore_artifact
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tasks.storage.lease import take_lease, this_process
from tasks.storage.prefect_results import StageRecords, decode_reference, encode_reference
from tasks.storage.roots import StorageError, UnreachableStorageError, open_root, require_exclusive_create
from tests.servers import S3Server, forget_clients
from tests.tasks.storage.made_artifacts import FOLDER, another, commit


@pytest.mark.parametrize(
    ("root", "shown"),
    [
        ("s3://KEY:12/34HIDDEN@bucket/runs", "s3://***@bucket/runs"),
        ("s3a://KEY:12/34HIDDEN@bucket/runs", "s3a://***@bucket/runs"),
        ("s3://KEY:HID/DEN/@bucket/runs", "s3://***@bucket/runs"),
        ("s3://KEY:443/HIDDEN@bucket", "s3://***@bucket"),
        ("s3://KEY@bucket/runs", "s3://***@bucket/runs"),
        ("sftp://me:HIDDEN@host:22/runs", "sftp://***@host:22/runs"),
        ("simplecache::s3://k:HIDDEN@bucket/runs", "simplecache::s3://***@bucket/runs"),
    ],
)
def test_credentials_are_refused_and_not_repeated(root: str, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        open_root(root)
    assert (caught.value.place, caught.value.value) == ("storage.root", shown)
    for secret in ("HIDDEN", "12/34", "KEY@"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("s3://bucket/runs@home/a:b@c", "bucket/runs@home/a:b@c"),
        (
            "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/runs",
            "arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/runs",
        ),
        ("file:///tmp/a@b:c", "/tmp/a@b:c"),
        ("memory://bucket:80/a@b", "/bucket:80/a@b"),
    ],
)
def test_other_signs_in_a_path_are_no_credentials(root: str, path: str) -> None:
    assert open_root(root)[1] == path


def test_without_its_package_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from grpo_core.errors import InputError\n"
        "from tasks.storage.roots import open_root\n"
        "try:\n    open_root('s3://bucket/runs')\n"
        "except InputError as error:\n    print(error.place, error.value, error.hint)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ended.stdout.startswith("storage.root s3://bucket/runs")
    assert "s3fs" in ended.stdout


def test_a_folder_for_copies_that_cannot_be_written_is_reported_before_the_run_starts(bucket: str) -> None:
    overrides = [f"storage.root={bucket}/runs", "storage.cache_dir=/dev/null", "run.name=run"]
    with pytest.raises(InputError) as caught:
        check_inputs(read_config("configs/tiny.yaml", overrides))
    assert [error.place for error in caught.value.errors] == ["storage.cache_dir"]


@contextlib.contextmanager
def environment(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> Iterator[None]:
    with monkeypatch.context() as changed:
        for name, value in values.items():
            changed.setenv(name, value)
        forget_clients()
        yield
    forget_clients()


RIGHTS = ("ListBucket", "GetObject", "PutObject", "DeleteObject")


class TestRefusals:
    def refusal(self, root: str) -> InputError:
        with pytest.raises(InputError) as caught:
            ArtifactStore(root, "run").require_writable()
        assert (caught.value.place, caught.value.value) == ("storage.root", root)
        return caught.value

    @pytest.mark.parametrize("missing", RIGHTS)
    def test_missing_rights(self, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
        user = s3.make_user(*(f"s3:{right}" for right in RIGHTS if right != missing))
        with environment(monkeypatch, user), s3.enforcing_rights():
            assert "list, read, write and delete" in self.refusal(f"{bucket}/runs").hint

    def test_wrong_keys(self, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = {"AWS_ACCESS_KEY_ID": "AKIAWRONG", "AWS_SECRET_ACCESS_KEY": "hidden-secret"}
        with environment(monkeypatch, wrong), s3.enforcing_rights():
            error = self.refusal(f"{bucket}/runs")
        assert "refuses" in error.hint
        assert "hidden-secret" not in str(error)
        assert "no such bucket" in self.refusal(f"{bucket}-absent/runs").hint

    def test_no_keys(self, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        forget_clients()
        assert "credentials" in self.refusal(f"{bucket}/runs").hint
        forget_clients()

    @pytest.mark.parametrize("listening", [False, True], ids=["nobody there", "no answer"])
    def test_address_without_an_answer(self, bucket: str, monkeypatch: pytest.MonkeyPatch, listening: bool) -> None:
        monkeypatch.setattr(roots, "LOOK", {"connect_timeout": 0.3, "read_timeout": 0.3})
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            if not listening:
                silent.close()
            with environment(monkeypatch, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}):
                assert "AWS_ENDPOINT_URL" in self.refusal(f"{bucket}/runs").hint


OPERATIONS: dict[str, Callable[[ArtifactStore, Any, Path], object]] = {
    "commit": lambda store, reference, folder: commit(store, "iteration_000002/rollouts"),
    "find": lambda store, reference, folder: store.find(FOLDER),
    "local_files": lambda store, reference, folder: store.local_files(reference, folder),
    "restore_artifact": lambda store, reference, folder: restore_artifact(store, reference),
    "write_file": lambda store, reference, folder: store.write_file("run.json", b"{}"),
    "read_file": lambda store, reference, folder: store.read_file("run.json"),
    "quarantine": lambda store, reference, folder: store.quarantine(["iteration_000001"], reason="a test"),
}


class TestFailuresInARun:
    def test_lost_rights_are_one_error_of_every_operation(
        self, s3: S3Server, remote: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        reference = commit(remote)
        with environment(monkeypatch, s3.make_user("s3:ListBucket")), s3.enforcing_rights():
            without = another(remote)
            for name, operation in OPERATIONS.items():
                with pytest.raises(StorageError, match="refuses") as caught:
                    operation(without, reference, tmp_path / name)
                assert caught.value.place == "storage.root", name
                assert retryable_kind(caught.value) is None, name
        assert remote.find(FOLDER) == reference

    def test_unreadable_records_make_no_stage_run(self, remote: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        use_store(remote)
        value = encode_reference(commit(remote))

        def unreachable(*arguments: Any, **options: Any) -> bytes:
            raise ConnectionError("connection reset by peer")

        for reading in (lambda: decode_reference(value), lambda: StageRecords().read_path("collect-rollouts-1")):
            with monkeypatch.context() as patch:
                patch.setattr(remote.filesystem, "cat_file", unreachable)
                with pytest.raises(UnreachableStorageError) as caught:
                    reading()
            assert retryable_kind(caught.value) is Retryable.STORAGE
            with pytest.raises(UnreachableStorageError):
                commit(remote, "iteration_000002/rollouts")
            with contextlib.suppress(StaleReferenceError):
                reading()
            assert remote.unread == set()


class ExclusiveFileSystem(LocalFileSystem):
    """The disk creates the file, or says that there is one."""

    protocol = "exclusive"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if mode == "create" else os.O_TRUNC)
        with open(os.open(self._strip_protocol(path), flags), "wb") as file:
            file.write(value)


class ForgetfulFileSystem(ExclusiveFileSystem):
    """A service that knows no conditional writes and ignores the condition."""

    protocol = "forgetful"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value)


REFUSED: dict[str, Callable[[], AbstractFileSystem]] = {
    "looks before it writes": LocalFileSystem,
    "looks, in a folder": lambda: DirFileSystem(path="/", fs=LocalFileSystem()),
    "looks, asynchronously": lambda: AsyncFileSystemWrapper(LocalFileSystem()),
    "looks, behind a cache": lambda: SimpleCacheFileSystem(fs=LocalFileSystem()),
    "looks, behind another cache": lambda: WholeFileCacheFileSystem(fs=LocalFileSystem()),
    "looks, in memory that is wrapped": lambda: DirFileSystem(path="/", fs=fsspec.filesystem("memory")),
    "ignores the condition": ForgetfulFileSystem,
}
ACCEPTED: dict[str, Callable[[], AbstractFileSystem]] = {
    "creates": ExclusiveFileSystem,
    "creates, in a folder": lambda: DirFileSystem(path="/", fs=ExclusiveFileSystem()),
    "is of one process": lambda: fsspec.filesystem("memory"),
}


@pytest.mark.parametrize("name", [*REFUSED, *ACCEPTED])
def test_what_creates_a_file_twice_has_no_lock(tmp_path: Path, name: str) -> None:
    filesystem = {**REFUSED, **ACCEPTED}[name]()
    filesystem.makedirs(str(tmp_path), exist_ok=True)
    lock = f"{tmp_path}/.lock"
    filesystem.makedirs(lock, exist_ok=True)
    if name in REFUSED:
        with pytest.raises(InputError, match="Two starts could write one run there") as caught:
            take_lease(filesystem, lock, this_process())
        assert caught.value.place == "storage.root"
    else:
        lease = take_lease(filesystem, lock, this_process())
        assert not isinstance(lease, str)
        lease.release()
    left = [path for path in filesystem.ls(lock, detail=False) if "probe" in path]
    assert left == []


def test_a_bucket_that_knows_conditions_has_a_lock(remote: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.require_writable()
    require_exclusive_create(remote.filesystem, remote.path(".lock"))
    assert remote.filesystem.find(remote.path()) == []
    s3 = type(remote.filesystem)
    write = s3._pipe_file

    async def unconditional(self: Any, path: str, data: bytes, mode: str = "overwrite", **options: Any) -> None:
        await write(self, path, data, **options)

    monkeypatch.setattr(s3, "_pipe_file", unconditional)
    monkeypatch.setattr(roots, "_EXCLUSIVE", WeakSet())
    with pytest.raises(InputError, match="Two starts could write one run there"):
        remote.require_writable()
