"""Requests to a bucket that wait for one another: each takes as long as the way there and back."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.artifacts.reference import ArtifactRef, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tasks.storage.prefect_results import decode_reference, encode_reference, record_stage, recorded_stage
from tests.tasks.storage.made_artifacts import FOLDER, another, moved

FILES = 12


class InARow:
    """The length of the longest chain of requests, each of which began after the one before had ended."""

    def __init__(self) -> None:
        self._ended = 0

    def count(self) -> int:
        """Return it since the last call."""
        found, self._ended = self._ended, 0
        return found

    async def pass_on(self, real: Any, *arguments: Any, **options: Any) -> Any:
        place = self._ended + 1
        await asyncio.sleep(0.1)
        try:
            return await real(*arguments, **options)
        finally:
            self._ended = max(self._ended, place)


@pytest.fixture
def in_a_row(monkeypatch: pytest.MonkeyPatch) -> InARow:
    chain, real = InARow(), S3FileSystem._call_s3

    async def noted(*arguments: Any, **options: Any) -> Any:
        return await chain.pass_on(real, *arguments, **options)

    monkeypatch.setattr(S3FileSystem, "_call_s3", noted)
    return chain


def commit(store: ArtifactStore, digest: str = "d", files: int = FILES) -> ArtifactRef:
    with store.staging() as staged:
        for number in range(files):
            (staged / f"{number}.bin").write_bytes(f"{digest} {number}".encode())
        return commit_artifact(store, staged, FOLDER, digest=digest, rows=1, seconds=1.0, metrics={})


def test_their_number_does_not_grow_with_the_files(remote: ArtifactStore, in_a_row: InARow, tmp_path: Path) -> None:
    reference = commit(remote)
    # The place, the files, the manifest.
    assert in_a_row.count() == 3
    record_stage(remote, "key", reference)
    assert in_a_row.count() == 1
    assert recorded_stage(another(remote), "key") == reference
    assert in_a_row.count() == 1
    use_store(another(remote))
    assert decode_reference(encode_reference(reference)) == reference
    assert in_a_row.count() < FILES / 2
    reader = another(remote)
    reader.files.cache.__init__(tmp_path / "another machine", 2**30)
    reader.local_files(reference, tmp_path / "fetched")
    assert in_a_row.count() < FILES
    assert moved(remote) == []


def test_what_this_process_has_written_is_verified_in_one(remote: ArtifactStore, in_a_row: InARow) -> None:
    reference = commit(remote, files=1)
    in_a_row.count()
    with remote.reading() as read:
        assert (read(reference) / "0.bin").read_bytes() == b"d 0"
    assert in_a_row.count() == 1
    assert remote.pruned_reason(reference, as_read=True) is None
    assert in_a_row.count() == 0
    # Another process takes it away; its files alone are no artifact.
    remote.filesystem.rm_file(remote.manifest_path(remote.path(FOLDER)))
    with pytest.raises(StaleReferenceError), remote.reading() as read:
        read(reference)
