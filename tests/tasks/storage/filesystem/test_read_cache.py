"""Copies of what was read from a bucket: right or not there, bounded, and never in the way of a stage."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from grpo_core.errors import InputError
from tasks.storage.artifacts.files import ArtifactFiles
from tasks.storage.artifacts.manifest import Manifest, written
from tasks.storage.filesystem.read_cache import ReadCache, default_cache
from tests.tasks.storage.made_artifacts import REPOSITORY

CONTENTS = [bytes([number]) * 100 for number in range(4)]
STAMP = {"size": "100", "ETag": "a"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def kept(cache: ReadCache) -> list[Path]:
    return [path for path in (cache.folder / "contents").rglob("*") if path.is_file()]


def keep(cache: ReadCache, folder: Path, content: bytes) -> None:
    (folder / "made").write_bytes(content)
    cache.keep(folder / "made", sha256(content))
    (folder / "made").unlink()


@pytest.fixture
def cache(tmp_path: Path) -> ReadCache:
    return ReadCache(tmp_path / "cache", 250)


class TestContents:
    def test_the_longest_unread_go_first(self, cache: ReadCache, tmp_path: Path) -> None:
        for number, content in enumerate(CONTENTS[:2]):
            keep(cache, tmp_path, content)
            os.utime(next(path for path in kept(cache) if path.name == sha256(content)), (number, number))
        assert cache.take(sha256(CONTENTS[0]), tmp_path / "read")  # the second is the longest unread from here on
        keep(cache, tmp_path, CONTENTS[2])
        assert {path.name for path in kept(cache)} == {sha256(CONTENTS[0]), sha256(CONTENTS[2])}
        assert not cache.take(sha256(CONTENTS[1]), tmp_path / "read")

    def test_it_never_holds_more_than_its_limit(self, cache: ReadCache, tmp_path: Path) -> None:
        for content in [*CONTENTS, bytes(251), bytes(250)]:
            keep(cache, tmp_path, content)
            assert sum(path.stat().st_size for path in kept(cache)) <= 250
        assert [path.name for path in kept(cache)] == [sha256(bytes(250))]

    def test_what_a_reader_has_stays_whole_when_it_goes(self, cache: ReadCache, tmp_path: Path) -> None:
        keep(cache, tmp_path, CONTENTS[0])
        assert cache.take(sha256(CONTENTS[0]), tmp_path / "reader" / "file")
        assert (tmp_path / "reader" / "file").stat().st_nlink == 2
        for content in CONTENTS[1:]:
            keep(cache, tmp_path, content)
        assert sha256(CONTENTS[0]) not in {path.name for path in kept(cache)}
        assert (tmp_path / "reader" / "file").read_bytes() == CONTENTS[0]

    def test_a_copy_takes_the_place_of_what_is_there(self, cache: ReadCache, tmp_path: Path) -> None:
        keep(cache, tmp_path, CONTENTS[0])
        (tmp_path / "file").write_bytes(b"other")
        for _ in range(2):
            assert cache.take(sha256(CONTENTS[0]), tmp_path / "file")
            assert (tmp_path / "file").read_bytes() == CONTENTS[0]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "file"]

    @pytest.mark.parametrize("changed", [b"", CONTENTS[0][:-1], b"x" + CONTENTS[0][1:]])
    def test_a_damaged_copy_is_noticed_and_removed(self, cache: ReadCache, tmp_path: Path, changed: bytes) -> None:
        keep(cache, tmp_path, CONTENTS[0])
        (only,) = kept(cache)
        only.write_bytes(changed)
        assert not cache.take(sha256(CONTENTS[0]), tmp_path / "file")
        assert not (tmp_path / "file").exists()
        assert kept(cache) == []
        keep(cache, tmp_path, CONTENTS[0])
        assert cache.take(sha256(CONTENTS[0]), tmp_path / "file")

    def test_a_note_in_which_a_byte_flipped_is_not_believed(self, cache: ReadCache) -> None:
        cache.note("s3://a/b", STAMP, "1" * 64)
        (path,) = (cache.folder / "seen").rglob("*.json")
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
            assert cache.seen("s3://a/b", STAMP) is None
        path.write_bytes(whole)
        assert cache.seen("s3://a/b", STAMP) == "1" * 64

    def test_notes_hold_for_one_place_and_state_alone(self, cache: ReadCache) -> None:
        cache.note("s3://a/b", STAMP, "1")
        assert cache.seen("s3://a/b", STAMP) == "1"
        assert cache.seen("s3://a/c", STAMP) is None
        assert cache.seen("s3://a/b", {**STAMP, "ETag": "b"}) is None
        for path in (cache.folder / "seen").rglob("*.json"):
            path.write_text("{")
        assert cache.seen("s3://a/b", STAMP) is None


class TestDisk:
    def test_a_full_disk_keeps_nothing_and_fails_nothing(self, tiny_disk: Path, tmp_path: Path) -> None:
        cache = ReadCache(tiny_disk / "cache", 2**30)
        keep(cache, tmp_path, CONTENTS[0])
        with pytest.raises(OSError, match="No space left"):
            (tiny_disk / "filler").write_bytes(bytes(2 << 20))
        keep(cache, tmp_path, bytes(2**19))
        cache.note("s3://a/b", STAMP, "1")
        assert cache.seen("s3://a/b", STAMP) is None
        assert cache.take(sha256(CONTENTS[0]), tmp_path / "file")  # from another disk: no link, a copy
        assert (tmp_path / "file").read_bytes() == CONTENTS[0]
        assert not cache.take(sha256(bytes(2**19)), tmp_path / "none")

    def test_a_cache_that_cannot_be_written_is_told_when_it_was_asked_for(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        cache = ReadCache(tmp_path / "file" / "cache", 2**30)
        keep(cache, tmp_path, CONTENTS[0])
        assert not cache.take(sha256(CONTENTS[0]), tmp_path / "read")
        with cache.reading(sha256(CONTENTS[0])):
            pass
        with pytest.raises(InputError, match=r"storage\.cache_dir.*Choose a folder that can be written"):
            cache.require_usable()

    def test_the_users_cache_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        found = default_cache()
        assert found is not None
        assert found.folder == tmp_path / "xdg" / "grpo"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", str(tmp_path))
        found = default_cache()
        assert found is not None
        assert found.folder == tmp_path / ".cache" / "grpo"


class TestFiles:
    @pytest.fixture
    def remote(self) -> "fsspec.AbstractFileSystem":
        memory = fsspec.filesystem("memory")
        memory.pipe_file("/read-cache/file", CONTENTS[0])
        yield memory
        memory.store.pop("/read-cache/file", None)

    def manifest(self, content: bytes) -> Manifest:
        return written({"digest": "d"}, {"file": sha256(content)})

    def test_a_reader_that_overwrites_its_file_leaves_other_readers_theirs(
        self, remote: "fsspec.AbstractFileSystem", cache: ReadCache, tmp_path: Path
    ) -> None:
        files = ArtifactFiles(remote, cache)
        assert files.fetch("/read-cache", self.manifest(CONTENTS[0]), tmp_path / "a") is None
        (tmp_path / "a" / "file").write_bytes(b"changed in place")
        # memory:// has no tag that tells a change, so each reader reads it again, into a file of its own.
        assert files.fetch("/read-cache", self.manifest(CONTENTS[0]), tmp_path / "a") is None
        assert (tmp_path / "a" / "file").read_bytes() == CONTENTS[0]
        assert files.fetch("/read-cache", self.manifest(CONTENTS[0]), tmp_path / "b") is None
        assert (tmp_path / "b" / "file").read_bytes() == CONTENTS[0]

    def test_what_is_there_is_told_by_name(
        self, remote: "fsspec.AbstractFileSystem", cache: ReadCache, tmp_path: Path
    ) -> None:
        files = ArtifactFiles(remote, cache)
        told = files.fetch("/read-cache", self.manifest(CONTENTS[1]), tmp_path)
        assert told == f"file has sha256 {sha256(CONTENTS[0])[:12]}, not {sha256(CONTENTS[1])[:12]}"
        remote.rm_file("/read-cache/file")
        assert files.fetch("/read-cache", self.manifest(CONTENTS[0]), tmp_path) == "file is missing"


SHARED = """
import hashlib, os, sys
from pathlib import Path
from tasks.storage.filesystem.read_cache import ReadCache

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
    others = [subprocess.Popen([*command, str(seed)], cwd=REPOSITORY) for seed in range(3)]
    assert [other.wait() for other in others] == [0, 0, 0]
    assert kept(cache)
    for path in kept(cache):
        assert sha256(path.read_bytes()) == path.name
    assert [path for path in (cache.folder / ".incoming").iterdir() if path.is_dir()] == []
