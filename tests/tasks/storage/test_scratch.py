"""Temporary files: none outlives the next start, and a full disk is the one that is full."""

import ast
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.process import CHECKOUT, environment
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import scratch_folder
from tasks.storage.roots import StorageError

KILLED = """
import os, signal, sys
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import scratch_folder
store = ArtifactStore(sys.argv[1], "run")
kinds = {"run": store.scratch, "none": scratch_folder, "staging": store.staging}
with kinds[sys.argv[2]]() as folder:
    (folder / "latents").write_bytes(bytes(1000))
    print(folder, flush=True)
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["run", "none", "staging"])
@pytest.mark.parametrize("way", ["killed", "alive"])
def test_a_start_removes_what_killed_processes_left_and_nothing_of_living_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, way: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", KILLED, str(tmp_path / "runs"), kind, way]
    variables = environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        if way == "killed":
            assert process.wait() == -signal.SIGKILL
        assert (left / "latents").exists()
        ArtifactStore(str(tmp_path / "runs"), "run").clear_abandoned()
        assert left.parent.exists() is (way == "alive")
        process.communicate()
    assert not left.parent.exists()


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
    made = set()
    for layer in ("flows", "tasks", "grpo_core", "configs", "data"):
        for file in (CHECKOUT / layer).rglob("*.py"):
            names = {getattr(node, "attr", None) for node in ast.walk(ast.parse(file.read_text()))}
            if names & {"TemporaryDirectory", "mkdtemp", "mkstemp"}:
                made.add(file.relative_to(CHECKOUT).as_posix())
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
