"""Copies of what was read from a bucket: verified, bounded, and never in the way of a stage."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from grpo_core.errors import InputError
from tasks.storage.artifacts.files import ArtifactFiles, ReadCache, default_cache
from tasks.storage.artifacts.reference import Manifest

CONTENTS = [bytes([number]) * 100 for number in range(4)]
VERSION = "s3://a/b 100 ETag a"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def kept(cache: ReadCache) -> dict[str, Path]:
    return {path.name: path for path in (cache.folder / "contents").glob("*")}


def keep(cache: ReadCache, folder: Path, content: bytes) -> None:
    (folder / "made").write_bytes(content)
    cache.keep(folder / "made", sha256(content))
    (folder / "made").unlink()


@pytest.fixture
def cache(tmp_path: Path) -> ReadCache:
    return ReadCache(tmp_path / "cache", 250)


class TestContents:
    def test_the_least_recently_read_is_evicted_first(self, cache: ReadCache, tmp_path: Path) -> None:
        for number, content in enumerate(CONTENTS[:2]):
            keep(cache, tmp_path, content)
            os.utime(kept(cache)[sha256(content)], (number, number))
        assert cache.take(sha256(CONTENTS[0]), tmp_path / "read")
        keep(cache, tmp_path, CONTENTS[2])
        assert set(kept(cache)) == {sha256(CONTENTS[0]), sha256(CONTENTS[2])}
        assert not cache.take(sha256(CONTENTS[1]), tmp_path / "read")

    def test_it_never_exceeds_its_limit(self, cache: ReadCache, tmp_path: Path) -> None:
        for content in [*CONTENTS, bytes(251), bytes(250)]:
            keep(cache, tmp_path, content)
            assert sum(path.stat().st_size for path in kept(cache).values()) <= 250
        assert list(kept(cache)) == [sha256(bytes(250))]

    def test_a_readers_copy_survives_eviction(self, cache: ReadCache, tmp_path: Path) -> None:
        keep(cache, tmp_path, CONTENTS[0])
        for _ in range(2):  # it replaces what is there
            (tmp_path / "reader").unlink(missing_ok=True)
            (tmp_path / "reader").write_bytes(b"other")
            assert cache.take(sha256(CONTENTS[0]), tmp_path / "reader")
        assert (tmp_path / "reader").stat().st_nlink == 2
        for content in CONTENTS[1:]:
            keep(cache, tmp_path, content)
        assert sha256(CONTENTS[0]) not in kept(cache)
        assert (tmp_path / "reader").read_bytes() == CONTENTS[0]
        assert {path.name for path in tmp_path.iterdir()} == {"cache", "reader"}

    @pytest.mark.parametrize("changed", [b"", CONTENTS[0][:-1], b"x" + CONTENTS[0][1:]])
    def test_a_damaged_copy_is_noticed_and_removed(self, cache: ReadCache, tmp_path: Path, changed: bytes) -> None:
        keep(cache, tmp_path, CONTENTS[0])
        kept(cache)[sha256(CONTENTS[0])].write_bytes(changed)
        assert not cache.take(sha256(CONTENTS[0]), tmp_path / "file")
        assert not (tmp_path / "file").exists()
        assert kept(cache) == {}
        keep(cache, tmp_path, CONTENTS[0])
        assert cache.take(sha256(CONTENTS[0]), tmp_path / "file")

    def test_a_note_is_of_one_version_and_believed_only_as_written(self, cache: ReadCache) -> None:
        cache.note(VERSION, "1" * 64)
        assert cache.seen(VERSION) == "1" * 64
        assert cache.seen(VERSION.replace("a/b", "a/c")) is None
        assert cache.seen(f"{VERSION}b") is None
        (path,) = (cache.folder / "seen").glob("*.json")
        valid = path.read_bytes()
        for position in range(len(valid)):
            path.write_bytes(valid[:position] + bytes([valid[position] ^ 4]) + valid[position + 1 :])
            assert cache.seen(VERSION) is None


class TestDisk:
    def test_a_full_disk_keeps_nothing_and_fails_nothing(self, tiny_disk: Path, tmp_path: Path) -> None:
        cache = ReadCache(tiny_disk / "cache", 2**30)
        keep(cache, tmp_path, CONTENTS[0])
        with pytest.raises(OSError, match="No space left"):
            (tiny_disk / "filler").write_bytes(bytes(2 << 20))
        keep(cache, tmp_path, bytes(2**19))
        cache.note(VERSION, "1")
        assert cache.seen(VERSION) is None
        assert cache.take(sha256(CONTENTS[0]), tmp_path / "file")  # from another disk: no link, a copy
        assert (tmp_path / "file").read_bytes() == CONTENTS[0]
        assert not cache.take(sha256(bytes(2**19)), tmp_path / "none")

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        cache = ReadCache(tmp_path / "file" / "cache", 2**30)
        keep(cache, tmp_path, CONTENTS[0])
        assert not cache.take(sha256(CONTENTS[0]), tmp_path / "read")
        with cache.reading(sha256(CONTENTS[0])):
            pass
        with pytest.raises(InputError) as caught:
            cache.require_usable()
        assert (caught.value.place, caught.value.value) == ("storage.cache_dir", str(cache.folder))

    @pytest.mark.parametrize(("given", "folder"), [("{}/xdg", "xdg/grpo"), ("relative", ".cache/grpo")])
    def test_the_users_cache_folder(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, folder: str
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", given.format(tmp_path))
        monkeypatch.setenv("HOME", str(tmp_path))
        found = default_cache()
        assert found is not None
        assert found.folder == tmp_path / folder


class TestFiles:
    def test_a_reader_that_overwrites_its_file_changes_no_other_readers(self, cache: ReadCache, tmp_path: Path) -> None:
        filesystem, manifest = Rewritten(0), Manifest({"digest": "d"}, {"file": sha256(CONTENTS[0])})
        filesystem.pipe_file("/read-cache/file", CONTENTS[0])
        files = ArtifactFiles(filesystem, cache)
        for folder in ("a", "a", "b"):
            assert files.fetch("/read-cache", manifest, tmp_path / folder) is None
            assert (tmp_path / folder / "file").read_bytes() == CONTENTS[0]
            (tmp_path / folder / "file").write_bytes(b"changed in place")
        filesystem.rm("/read-cache", recursive=True)

    @pytest.mark.parametrize("times", [1, 2, 3])
    def test_no_note_says_of_a_content_that_it_is_another(self, cache: ReadCache, times: int) -> None:
        filesystem, place = Rewritten(times), "/changing/file"
        filesystem.pipe_file(place, b"b" if times % 2 else b"a")
        files = ArtifactFiles(filesystem, cache)
        try:
            assert files.sha256(place) == sha256(b"a")
            for content in (b"b", b"a", b"b"):
                filesystem.pipe_file(place, content)
                assert files.sha256(place) == sha256(content)
        finally:
            filesystem.rm_file(place)


class Rewritten(MemoryFileSystem):
    """Has tags, and another writer that replaces the content between the look and the read, so many times."""

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


SHARED = """
import hashlib, sys
from pathlib import Path
from tasks.storage.artifacts.files import ReadCache

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
cache = ReadCache(folder / "cache", 250)
contents = [bytes([number]) * 100 for number in range(4)]
for turn in range(60):
    content = contents[(turn * 7 + seed) % 4]
    sha256 = hashlib.sha256(content).hexdigest()
    target = folder / f"{seed}-{turn}"
    if not cache.take(sha256, target):
        target.write_bytes(content)
        cache.keep(target, sha256)
    assert target.read_bytes() == content
"""


def test_several_processes_at_once(cache: ReadCache, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHARED, str(tmp_path)]
    others = [subprocess.Popen([*command, str(seed)]) for seed in range(3)]
    assert [other.wait() for other in others] == [0, 0, 0]
    assert kept(cache)
    for name, path in kept(cache).items():
        assert sha256(path.read_bytes()) == name
