"""Files of a bucket that change while they are read."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tasks.storage.artifacts.files import ArtifactFiles
from tasks.storage.filesystem.read_cache import ReadCache

PLACE = "/changing/file"


class Rewritten(MemoryFileSystem):
    """Has tags, and another writer that puts other content there, between the look and the read, so many times."""

    cachable = False

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        tag = hashlib.md5(self.cat_file(path), usedforsecurity=False).hexdigest()
        return {**super().info(path, **options), "ETag": tag}

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        if self.left:
            self.left -= 1
            self.pipe_file(rpath, b"ab"[self.left % 2 :][:1])
        Path(lpath).write_bytes(self.cat_file(rpath))


@pytest.mark.parametrize("times", [1, 2, 3])
def test_no_note_says_of_a_content_that_it_is_another(tmp_path: Path, times: int) -> None:
    filesystem = Rewritten(times)
    filesystem.pipe_file(PLACE, b"b" if times % 2 else b"a")
    files = ArtifactFiles(filesystem, ReadCache(tmp_path / "cache", 10**6))
    try:
        assert files.sha256(PLACE) == hashlib.sha256(b"a").hexdigest()
        for content in (b"b", b"a", b"b"):
            filesystem.pipe_file(PLACE, content)
            assert files.sha256(PLACE) == hashlib.sha256(content).hexdigest()
    finally:
        filesystem.rm_file(PLACE)
