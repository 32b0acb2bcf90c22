"""Temporary files, none of which outlives the next start; a full disk; and writes that are complete or absent."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from grpo_core.errors import InputError
from grpo_core.user_code.files import PROJECT_PACKAGES
from tasks.process import CHECKOUT, environment
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import fsync_folder, matching, move_folder, remove_folder, scratch_folder, temporary_folder
from tasks.storage.roots import StorageError

KILLED = """
import os, signal, sys
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import scratch_folder
store = ArtifactStore(sys.argv[1], "run")
with store.scratch() as of_run, scratch_folder() as of_none, store.staging() as staged:
    for folder in (of_run, of_none, staged):
        (folder / "latents").write_bytes(bytes(1000))
    print(of_run, of_none, staged, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


@pytest.mark.parametrize("way", ["killed", "alive"])
def test_a_start_removes_what_killed_processes_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", KILLED, str(tmp_path / "runs"), way]
    variables = environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        left = [Path(folder) for folder in process.stdout.readline().split()]
        if way == "killed":
            assert process.wait() == -signal.SIGKILL
        assert [(folder / "latents").exists() for folder in left] == [True] * 3
        with scratch_folder():
            # Commands that only read a run, such as a verification.
            assert [folder.parent.exists() for folder in left] == [way == "alive", way == "alive", True]
        ArtifactStore(str(tmp_path / "runs"), "run").clear_abandoned()
        assert [folder.parent.exists() for folder in left] == [way == "alive"] * 3
        process.communicate()
    assert not any(folder.parent.exists() for folder in left)


MAKES_FOLDERS = {
    # Next to what they become, so that a rename does.
    "flows/export/export.py",
    "flows/preflight/engine.py",
    "tasks/reports/report.py",
    "data/recipes/trainer.py",
    # A few lines of text.
    "flows/command_line/flow_commands.py",
}


def test_temporary_folders_are_made_where_a_start_looks_for_them() -> None:
    files = [file for layer in ("flows", *PROJECT_PACKAGES) for file in (CHECKOUT / layer).rglob("*.py")]
    making = re.compile(r"\.(TemporaryDirectory|mkdtemp|mkstemp)\(")
    made = {file.relative_to(CHECKOUT).as_posix() for file in files if making.search(file.read_text())}
    assert made == MAKES_FOLDERS


def fill(folder: Path) -> None:
    with (folder / "full").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def make_folders(folder: Path) -> None:
    """Its errors have a name, where those of an open file have none."""
    try:
        fill(folder)
    except OSError:
        for number in range(10_000):
            (folder / f"{number}").mkdir()
            (folder / f"{number}" / "file").write_bytes(bytes(4096))


@pytest.mark.parametrize("failing", [fill, make_folders])
@pytest.mark.parametrize("full", ["TMPDIR", "storage.root"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_disk_that_is_full_is_named_with_its_free_space(
    tiny_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: Callable[[Path], None],
    full: str,
    nested: bool,
) -> None:
    """In an update the temporary folder is used while its results are staged on the root's disk."""
    other = tmp_path / "other"
    other.mkdir()
    temporary, root = (tiny_disk, other) if full == "TMPDIR" else (other, tiny_disk)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    store = ArtifactStore(str(root), "run")

    def fail() -> None:
        if full == "storage.root":
            with store.scratch(), store.staging() as folder:
                failing(folder)
        elif nested:
            with store.staging(), store.scratch() as folder:
                failing(folder)
        else:
            with store.scratch() as folder:
                failing(folder)

    with pytest.raises(StorageError, match=r"the disk is full \(0\.\d MiB free\)") as caught:
        fail()
    assert (caught.value.place, caught.value.value) == (full, str(tiny_disk))
    assert [each for each in tiny_disk.rglob("*") if each.name == "full"] == []
    with scratch_folder() as folder:
        assert os.listdir(folder) == []


@pytest.mark.parametrize(("mask", "rights"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_published_files_have_the_rights_that_the_person_gives(tmp_path: Path, mask: int, rights: int) -> None:
    previous = os.umask(mask)
    try:
        staged = tmp_path / "staged"
        (staged / "inner").mkdir(parents=True)
        save_file({"a": torch.zeros(2)}, staged / "weights.safetensors")
        (staged / "inner" / "state.json").write_text("{}")
        fsync_folder(staged)
        move_folder(staged, tmp_path / "published")
    finally:
        os.umask(previous)
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "published").rglob("*") if path.is_file()}
    assert found == {"weights.safetensors": rights, "state.json": rights}


@pytest.mark.parametrize("protocol", ["file", "memory"])
@pytest.mark.parametrize("name", ["a[bc]", "a*", "a?", "[!x]b", "**", "a{b,c}", "plain"])
def test_no_character_of_a_folder_is_a_pattern(tmp_path: Path, protocol: str, name: str) -> None:
    filesystem, top = fsspec.filesystem(protocol, auto_mkdir=True), f"{tmp_path}/{protocol}"
    files = ("1/lock", "1/other", "2/lock", "21/deep/lock", "lock")
    for folder in (name, "ab", "ac"):
        for file in files:
            filesystem.pipe_file(f"{top}/{folder}/{file}", b"x")
    own = f"{top}/{name}"
    try:
        assert matching(filesystem, own, "*/lock") == [f"{own}/1/lock", f"{own}/2/lock"]
        assert matching(filesystem, own, "2*") == [f"{own}/2", f"{own}/21"]
        assert matching(filesystem, own, "[12]/o?her") == [f"{own}/1/other"]
        assert matching(filesystem, own, "lock/*") == matching(filesystem, f"{own}/none", "*") == []
        remove_folder(filesystem, f"{own}/none")
        remove_folder(filesystem, own)
        assert sorted(filesystem.find(top)) == [f"{top}/{folder}/{file}" for folder in ("ab", "ac") for file in files]
    finally:
        filesystem.rm(top, recursive=True)


class TestTemporaryFolder:
    """Where artifacts for a bucket are written first."""

    @pytest.fixture
    def temporary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        return tmp_path

    def test_it_is_the_users_alone(self, temporary: Path) -> None:
        folder = temporary_folder()
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        assert temporary_folder() == folder

    @pytest.mark.parametrize("other", ["a link", "a dangling link", "a file", "writable for others", "another user's"])
    def test_what_somebody_else_may_have_put_there_is_refused(self, temporary: Path, other: str) -> None:
        place, elsewhere = temporary / f"grpo-{os.geteuid()}", temporary / "elsewhere"
        if other == "a link":
            elsewhere.mkdir()
        if "link" in other:
            place.symlink_to(elsewhere)
        elif other == "a file":
            place.touch()
        else:
            place.mkdir(mode=0o700)
        if other == "writable for others":
            place.chmod(0o777)
        if other == "another user's":
            if os.geteuid() != 0:
                pytest.skip("only root can make another user's folder; run the tests as root")
            os.chown(place, 12345, 12345)
        store = ArtifactStore("memory://staged", "run")
        for ask in (store.clear_abandoned, lambda: store.staging().__enter__()):
            with pytest.raises(InputError) as caught:
                ask()
            assert caught.value.place == "TMPDIR"
