"""Bytes of files on a disk that are hashed: a run of many iterations has terabytes."""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.restore import restore_artifact
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import SETTLED_NS
from tests.tasks.storage.made_artifacts import FILES, FOLDER, PART, another, commit, flip


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the artifacts' files that are hashed, in order."""
    names, real = list[str](), hashlib.file_digest

    def noted(stream: Any, algorithm: str) -> Any:
        names.extend(name for name in FILES if str(stream.name).endswith(name))
        return real(stream, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    return names


def age(store: ArtifactStore) -> None:
    for name in FILES:
        os.utime(store.path(f"{FOLDER}/{name}"), (1, 1))
    # This has changed them, too.
    time.sleep(2e-9 * SETTLED_NS)


def test_one_start_hashes_every_file_once(local: ArtifactStore, hashed: list[str]) -> None:
    reference = commit(local)
    age(local)
    for start in (another(local), another(local)):
        hashed.clear()
        for _ in range(3):
            assert restore_artifact(start, reference) == reference
            with start.reading() as read_artifact:
                read_artifact(reference)
        assert sorted(hashed) == sorted(FILES)


def test_readers_at_once_hash_every_file_once(local: ArtifactStore, hashed: list[str]) -> None:
    reference = commit(local)
    age(local)
    hashed.clear()
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(another(local).local_files, [reference] * 16))) == 1
    assert sorted(hashed) == sorted(FILES)


@pytest.mark.parametrize("with_times", [False, True], ids=["its time changes", "its time is put back"])
def test_a_change_after_that_is_found(local: ArtifactStore, with_times: bool) -> None:
    reference = commit(local)
    age(local)
    local.local_files(reference)
    flip(local, PART)
    if with_times:
        age(local)
    with pytest.raises(StaleReferenceError, match=r"part-00000\.parquet has sha256"):
        local.local_files(reference)


def test_a_start_finds_a_bit_that_a_disk_has_lost(local: ArtifactStore) -> None:
    reference = commit(local)
    age(local)
    local.local_files(reference)
    known, path = os.stat(local.path(PART)), Path(local.path(PART))
    flip(local, PART)
    os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_size) == (known.st_ino, known.st_size)
    with pytest.raises(StaleReferenceError, match=r"part-00000\.parquet has sha256"):
        another(local).local_files(reference)


def test_a_file_that_was_just_written_is_not_remembered(local: ArtifactStore, hashed: list[str]) -> None:
    # Within a tick of the disk's clock another content would have the same time.
    reference, ahead = commit(local), time.time() + 1000
    for name in FILES:
        os.utime(local.path(f"{FOLDER}/{name}"), (ahead, ahead))
    hashed.clear()
    for _ in range(2):
        local.local_files(reference)
    assert sorted(hashed) == sorted([*FILES, *FILES])
