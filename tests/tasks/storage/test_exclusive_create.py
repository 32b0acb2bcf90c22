"""A root has a lock only if a file that exists cannot be created again there."""

import os
from collections.abc import Callable
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

from grpo_core.errors import InputError
from tasks.storage import roots
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.lease import take_lease, this_process
from tasks.storage.roots import require_exclusive_create


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


def test_a_bucket_with_conditional_writes_has_a_lock(remote: ArtifactStore) -> None:
    remote.require_writable()
    require_exclusive_create(remote.filesystem, remote.path(".lock"))
    assert remote.filesystem.find(remote.path()) == []


def test_a_bucket_that_ignores_conditions_is_refused_before_a_run(
    remote: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = type(remote.filesystem)
    write = s3._pipe_file

    async def unconditional(self: Any, path: str, data: bytes, mode: str = "overwrite", **options: Any) -> None:
        await write(self, path, data, **options)

    monkeypatch.setattr(s3, "_pipe_file", unconditional)
    monkeypatch.setattr(roots, "_EXCLUSIVE", WeakSet())
    with pytest.raises(InputError, match="Two starts could write one run there"):
        remote.require_writable()
