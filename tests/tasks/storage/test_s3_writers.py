"""Artifacts in a bucket that two write at once, or one too late, or whose writer is killed before any request."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.storage.artifacts import commit as committing
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.storage import s3_runs
from tests.tasks.storage.made_artifacts import FILES, FOLDER, REPOSITORY, commit
from tests.tasks.storage.s3_runs import PART_0, read, reasons

store = s3_runs.store

TWO_WRITERS = """
import sys
from tasks.storage.artifacts import commit as committing
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.storage.made_artifacts import commit

root, seconds, rows = sys.argv[1:]
real = committing._write

def waiting(*arguments, **options):
    if not waiting.once:
        waiting.once = True
        print("ready", flush=True)
        sys.stdin.readline()
    return real(*arguments, **options)

waiting.once = False
committing._write = waiting
print(commit(ArtifactStore(root, "run"), seconds=float(seconds), rows=int(rows)).sha256, flush=True)
"""


class TestTwoWriters:
    def write_at_once(self, root: str, rows: tuple[int, int]) -> tuple[str, str]:
        """Two processes that have both seen the place empty; the sha256 that each comes back with."""
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-c", TWO_WRITERS, root, str(number), str(count)],
                        cwd=REPOSITORY,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                for number, count in enumerate(rows)
            ]
            for writer in writers:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "ready\n"
            told = [writer.communicate("go\n", timeout=120)[0].strip() for writer in _both_started(writers)]
            assert [writer.wait() for writer in writers] == [0, 0]
        return told[0], told[1]

    def test_both_come_back_with_the_one_that_stands(self, store: ArtifactStore, tmp_path: Path) -> None:
        told = self.write_at_once(f"s3://{store.root}", (4, 4))
        found = store.find(FOLDER)
        assert found is not None
        assert found.sha256 in told
        for sha256 in told:
            reference = found.model_copy(update={"sha256": sha256})
            assert store.restore_artifact(reference) == reference
            assert read(store, tmp_path / sha256, reference) == FILES

    @pytest.mark.slow
    def test_another_result_sets_the_first_aside(self, store: ArtifactStore, tmp_path: Path) -> None:
        told = self.write_at_once(f"s3://{store.root}", (4, 5))
        found = store.find(FOLDER)
        assert found is not None
        assert found.sha256 in told
        assert told[0] != told[1]
        assert read(store, tmp_path / "fetched", found) == FILES


def _both_started(writers: list["subprocess.Popen[str]"]) -> list["subprocess.Popen[str]"]:
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    return writers


class TestSlowWriter:
    def test_files_that_another_put_over_them_are_written_again(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A worker that was thought dead puts its file there just when the manifest has been made."""
        real = committing.create_manifest

        def overtaken(store: ArtifactStore, path: str, manifest: Any) -> bool:
            made = real(store, path, manifest)
            store.filesystem.pipe_file(store.path(PART_0), b"another's")
            return made

        monkeypatch.setattr(committing, "create_manifest", overtaken)
        reference = commit(store)
        assert store.filesystem.cat_file(store.path(PART_0)) == FILES["part-00000.parquet"]
        assert read(store, tmp_path / "fetched", reference) == FILES

    def test_an_artifact_that_it_damaged_is_mended_and_its_reference_stays_right(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        reference = commit(store, seconds=1.0)
        store.filesystem.pipe_file(store.path(PART_0), b"another's")
        mended = commit(store, seconds=2.0)
        assert mended.sha256 != reference.sha256
        assert store.restore_artifact(reference) == reference
        assert read(store, tmp_path / "fetched", reference) == FILES
        assert reasons(store) == []


SWEEP = """
import os, signal, sys
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.storage.made_artifacts import FOLDER, commit

root, first, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
CALLS = ("put_file", "pipe_file", "cp_file", "rm_file", "cat_file", "exists", "info", "find", "glob")

def count_down(store, number):
    for name in CALLS:
        real = getattr(store.filesystem, name)
        def counted(*arguments, real=real, **options):
            count_down.left -= 1
            if count_down.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        setattr(store.filesystem, name, counted)
    count_down.left = number

number = first
while True:
    pid = os.fork()
    if pid == 0:
        store = ArtifactStore(root, f"run{number}")
        commit(store, rows=4)
        count_down(store, number)
        commit(store, rows=5)
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    print(number, killed, flush=True)
    if not killed:
        break
    number += step
"""


def sweep(root: str, first: int, step: int) -> list[int]:
    """Numbers of the requests before which a commit over another artifact was killed, each in a run of its own."""
    command = [sys.executable, "-c", SWEEP, root, str(first), str(step)]
    told = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in told if line.endswith("True")]


class TestKill:
    def require_whole(self, root: str, number: int, folder: Path) -> bool:
        """After a kill the one artifact or the other is whole, or none is there and the first comes home."""
        store = ArtifactStore(root, f"run{number}")
        found = store.find(FOLDER)
        if found is not None:
            assert read(store, folder / f"{number}", found) == FILES
        first = store.find(FOLDER)
        again = commit(store, rows=5)
        assert read(store, folder / f"{number}-again", again) == FILES
        assert again.rows == 5
        return first is not None

    def test_kill_leaves_a_whole_artifact_or_none(self, store: ArtifactStore, tmp_path: Path) -> None:
        root = f"s3://{store.root}"
        found = [self.require_whole(root, number, tmp_path) for number in sweep(root, 4, 9)]
        assert True in found
        assert False in found

    @pytest.mark.slow
    def test_kill_before_every_single_request(self, store: ArtifactStore, tmp_path: Path) -> None:
        root = f"s3://{store.root}"
        found = [self.require_whole(root, number, tmp_path) for number in sweep(root, 1, 1)]
        assert len(found) > 15
        assert found[0]
        assert found[-1]
