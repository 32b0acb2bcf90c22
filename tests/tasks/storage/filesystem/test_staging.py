"""Where artifacts for a bucket are written before they go there: cleared after a killed process, nobody else's."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from grpo_core.errors import InputError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.filesystem.staging import temporary_folder
from tests.tasks.storage.made_artifacts import REPOSITORY

WRITER = """
import os, signal, sys
from tasks.storage.artifacts.store import ArtifactStore
with ArtifactStore("memory://staged", "run").staging() as staged:
    (staged / "part-00000.parquet").write_bytes(b"x" * 100_000)
    print(staged, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    memory = fsspec.filesystem("memory")
    if memory.exists("/staged"):
        memory.rm("/staged", recursive=True)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(temporary: Path) -> None:
    command = [sys.executable, "-c", WRITER]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        staged = Path(writer.stdout.readline().strip())
        try:
            # Another run of the same user on this machine.
            store = ArtifactStore("memory://staged", "another")
            store.clear_abandoned()
            with store.staging() as own:
                (own / "own").write_bytes(b"own")
                store.clear_abandoned()
                assert files(temporary) == ["own", "part-00000.parquet"]
            assert files(staged) == ["part-00000.parquet"]
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    assert files(temporary) == ["part-00000.parquet"]
    store.clear_abandoned()
    assert files(temporary) == []
    assert not staged.exists()


def test_it_is_the_users_alone(temporary: Path) -> None:
    folder = temporary_folder()
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700
    assert temporary_folder() == folder


@pytest.mark.parametrize("other", ["a link", "a dangling link", "a file", "writable for others"])
def test_what_another_may_have_put_there_is_refused(temporary: Path, other: str) -> None:
    place = temporary / f"grpo-{os.geteuid()}"
    elsewhere = temporary / "elsewhere"
    if other == "a link":
        elsewhere.mkdir()
    if "link" in other:
        place.symlink_to(elsewhere)
    elif other == "a file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o777)
    store = ArtifactStore("memory://staged", "run")
    for ask in (store.clear_abandoned, lambda: store.staging().__enter__()):
        with pytest.raises(InputError, match=r"TMPDIR: .*remove it, or set TMPDIR"):
            ask()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_refused(temporary: Path) -> None:
    place = temporary / "grpo-0"
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)
    with pytest.raises(InputError, match="TMPDIR"):
        temporary_folder()
