"""Copies of what was read from a bucket: verified, bounded, and never in the way of a stage."""

import contextvars
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from configs.placement import StorageSection
from configs.scoring import RewardSection
from grpo_core.errors import InputError
from tasks.execution.call import StageCall, call_of, carry_out
from tasks.execution.stage import stage_named
from tasks.progress import listen
from tasks.storage.artifacts.files import ArtifactFiles, ReadCache, default_cache
from tasks.storage.artifacts.reference import ArtifactRef, Manifest, read_manifest
from tasks.storage.artifacts.store import described, open_store, use_store
from tasks.storage.files import dump_checked, load_checked
from tests.processes import ProgressLog
from tests.tasks.execution.test_dispatch import reward_arguments
from tests.tasks.update.update_jobs import IMAGES

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
    @pytest.mark.parametrize("read", [0, 1])
    def test_the_least_recently_read_is_evicted_first(self, cache: ReadCache, tmp_path: Path, read: int) -> None:
        for content in CONTENTS[:2]:
            keep(cache, tmp_path, content)
            os.utime(kept(cache)[sha256(content)], (1, 1))
        assert cache.take(sha256(CONTENTS[read]), tmp_path / "read")
        keep(cache, tmp_path, CONTENTS[2])
        assert set(kept(cache)) == {sha256(CONTENTS[read]), sha256(CONTENTS[2])}
        assert not cache.take(sha256(CONTENTS[1 - read]), tmp_path / "read")

    def test_a_file_counts_as_read_when_it_is_kept(self, cache: ReadCache, tmp_path: Path) -> None:
        (tmp_path / "old").write_bytes(CONTENTS[0])
        keep(cache, tmp_path, CONTENTS[1])
        os.utime(kept(cache)[sha256(CONTENTS[1])], (1, 1))
        os.utime(tmp_path / "old", (0, 0))
        cache.keep(tmp_path / "old", sha256(CONTENTS[0]))
        keep(cache, tmp_path, CONTENTS[2])
        assert set(kept(cache)) == {sha256(CONTENTS[0]), sha256(CONTENTS[2])}

    def test_it_never_exceeds_its_limit(self, cache: ReadCache, tmp_path: Path) -> None:
        for content in [*CONTENTS, bytes(251), bytes(250)]:
            keep(cache, tmp_path, content)
            assert sum(path.stat().st_size for path in kept(cache).values()) <= 250
        assert list(kept(cache)) == [sha256(bytes(250))]

    def test_entries_are_looked_at_once_in_a_16th_of_the_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache, looked, real = ReadCache(tmp_path / "cache", 32_000), list[Path](), Path.iterdir

        def noted(folder: Path) -> Iterator[Path]:
            looked.append(folder)
            return real(folder)

        monkeypatch.setattr(Path, "iterdir", noted)
        for number in range(400):
            keep(cache, tmp_path, f"{number:0100d}".encode())
            assert sum(path.stat().st_size for path in kept(cache).values()) <= 32_000
        # 20 of 100 bytes each time.
        assert len(looked) == 20
        names = {sha256(f"{number:0100d}".encode()) for number in range(100, 400)}
        assert names <= set(kept(cache))

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
    others = [subprocess.Popen([*command, str(seed)]) for seed in range(2)]
    assert [other.wait() for other in others] == [0, 0]
    assert kept(cache)
    for name, path in kept(cache).items():
        assert sha256(path.read_bytes()) == name


def section(bucket: str, folder: Path) -> StorageSection:
    return StorageSection(root=f"{bucket}/runs", cache_dir=str(folder), cache_gib=0.5)


@pytest.mark.slow
def test_a_machine_without_that_folder_keeps_its_own(bucket: str, tmp_path: Path) -> None:
    store = open_store(section(bucket, tmp_path / "copies"), "run")
    use_store(store)
    rollouts = IMAGES.collect()
    made = call_of(stage_named("score reward"), reward_arguments(rollouts, RewardSection(reward="jpeg")), store)
    # As it comes out of the file that it travels in.
    call = StageCall.model_validate_json(made.model_dump_json())
    shutil.rmtree(tmp_path / "copies")
    (tmp_path / "copies").write_text("here it is a file")
    log = ProgressLog()

    def elsewhere() -> None:
        listen(log)
        assert carry_out(call).error is None
        assert carry_out(call).error is None

    contextvars.copy_context().run(elsewhere)
    manifest = store.manifest_at(store.path(rollouts.folder))
    assert {path.name for path in (tmp_path / "cache/grpo/contents").iterdir()} >= set(manifest.files.values())
    (line,) = [line for line in log.lines if "cache_dir" in line]
    assert str(tmp_path / "copies") in line


def test_only_a_chosen_folder_goes_with_a_call(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = section(bucket, tmp_path / "copies")
    assert described(open_store(chosen, "run")) == chosen
    usual = chosen.model_copy(update={"cache_dir": None})
    assert described(open_store(usual, "run")) == usual
    monkeypatch.chdir(tmp_path)
    relative = described(open_store(section(bucket, Path("beside")), "run"))
    assert relative.cache_dir == str(tmp_path / "beside")
    here = StorageSection(root=str(tmp_path), cache_dir=str(tmp_path / "copies"))
    assert described(open_store(here, "run")) == StorageSection(root=f"file://{tmp_path}")
    call = StageCall(
        stage="score reward", storage=section(bucket, tmp_path / "copies"), run="run", roots=(), code="", arguments={}
    )
    moved = call.model_copy(update={"storage": call.storage.model_copy(update={"cache_dir": None, "cache_gib": 2.0})})
    assert moved.digest == call.digest
    other = call.model_copy(update={"storage": call.storage.model_copy(update={"root": f"{bucket}/other"})})
    assert other.digest != call.digest


DESCRIBED = {"schema_version": 2, "rows": 4, "seconds": 0.1, "metrics": {"loss": 1e-9}, "files": {"a": "b"}}


@given(st.integers(0, len(dump_checked(DESCRIBED)) * 8 - 1))
def test_a_flipped_bit_breaks_the_checksum(bit: int) -> None:
    assert load_checked(dump_checked(DESCRIBED)) == DESCRIBED
    changed = bytearray(dump_checked(DESCRIBED))
    changed[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(ValueError, match=r"checksum|JSON|Expecting|decode|control|delimiter"):
        load_checked(bytes(changed))


OUTSIDE = ["../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "", ".", "..", "a\\..\\b", "a\0b", "a\nb", "a/"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    for entry in ("files", "deleted"):
        with pytest.raises(ValueError, match="which is not in its folder"):
            read_manifest(dump_checked({**DESCRIBED, entry: {name: "b"}}))
    with pytest.raises(ValidationError, match="below the storage root"):
        ArtifactRef(uri=f"run/{name}", sha256="a", digest="d", schema_version=1, rows=1, seconds=0.0, metrics={})


@pytest.mark.parametrize("entry", [{"files": ["a"]}, {"files": {"a": 1}}, {"deleted": "a"}, {"pruned": "a"}])
def test_entries_of_the_wrong_kind_are_refused(entry: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="manifest"):
        read_manifest(dump_checked({**DESCRIBED, **entry}))


def test_written_manifests_are_read_back() -> None:
    first = Manifest({"digest": "d"}, {"a": "b", "gone": "d"})
    second = Manifest({"digest": "d"}, {"a": "b"}, {"why": "age"}, {"gone": "d"})
    assert [read_manifest(each.content) for each in (first, second)] == [first, second]
    assert first.content != second.content
    named = dict.fromkeys(("part-00000.parquet", "a/b..c", "...", "ein Maß/数.png"), "b")
    assert read_manifest(dump_checked({**DESCRIBED, "files": named})).files == named
    # References mean both.
    assert first.sha256 == second.sha256
