"""An artifact is complete or absent: with several writers, after a kill at any step, and when its files are deleted."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.storage.artifacts.commit import left_over, removed_by
from tasks.storage.artifacts.reference import ArtifactRef, PrunedArtifactError, StaleReferenceError
from tasks.storage.artifacts.restore import restore_artifact
from tasks.storage.artifacts.run_folder import INCOMING
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import dump_checked, is_local
from tests.tasks.storage.made_artifacts import (
    FILES,
    FOLDER,
    MANIFEST,
    NESTED,
    ON_EACH_KIND_OF_ROOT,
    PART,
    PRUNED,
    Steps,
    another,
    commit,
    contents,
    delete,
    moved,
    overwrite,
    read,
    root_url,
    writer_elsewhere,
)

# Both writers have the same result for the first three runs, and each its own for the others.
AT_ONCE = """
import sys
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.storage.made_artifacts import commit

root, number = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for turn in range(6):
    rows = 4 if turn < 3 else 4 + number
    print(commit(ArtifactStore(root, f"run{turn}"), seconds=float(number), rows=rows).sha256, flush=True)
"""


@ON_EACH_KIND_OF_ROOT
def test_writers_at_once_get_the_first_result_or_quarantine_it(store: ArtifactStore, tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    commands = [[sys.executable, "-c", AT_ONCE, root_url(store), str(number)] for number in range(2)]
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(subprocess.Popen(command, **pipes)) for command in commands]
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        for writer in writers:
            writer.stdin.write(b"go\n")
            writer.stdin.flush()
        written = [writer.communicate(timeout=300)[0].decode().split() for writer in writers]
        assert [writer.returncode for writer in writers] == [0, 0]
    for turn in range(6):
        run = another(store, f"run{turn}")
        found = run.find(FOLDER)
        references = [found.model_copy(update={"sha256": each[turn]}) for each in written]
        if turn < 3:
            assert references == [found, found]
            assert read(run, found, tmp_path / str(turn)) == FILES
            assert moved(run) == [] or not is_local(store.filesystem)
        else:
            assert found in references
            assert read(run, found, tmp_path / str(turn)) == FILES
            if is_local(store.filesystem):
                # In a bucket no lock orders them: the last one's files may lie under the first one's manifest.
                assert moved(run) == ["another result of the same stage took its place"]
                assert [restore_artifact(run, each) for each in references] == references


CHANGES: dict[str, Callable[[ArtifactStore, ArtifactRef], ArtifactRef]] = {
    "another result": lambda store, reference: commit(store, rows=5),
    "fewer files": lambda store, reference: delete(store, reference, [NESTED]),
    "no files": lambda store, reference: delete(store, reference, FILES),
}
KILL = """
import sys
from tests.tasks.storage.artifacts.test_commit import prepare
from tests.tasks.storage.made_artifacts import kill_before_each_step
kill_before_each_step(lambda number: prepare(sys.argv[1], f"run{number}", sys.argv[2]))
"""


def prepare(url: str, run: str, change: str) -> Callable[[], tuple[Steps, Callable[[], object]]]:
    """Commit an artifact, and return what changes it in another process; a step is a change of the disk or bucket."""
    reference = commit(ArtifactStore(url, run))

    def begin() -> tuple[Steps, Callable[[], object]]:
        store = ArtifactStore(url, run)
        requests: Steps = [(store.filesystem, name) for name in ("put_file", "pipe_file", "cp_file")]
        changing = [(Path, "rename"), (Path, "replace"), (os, "fsync")] if is_local(store.filesystem) else requests
        return [(store.filesystem, "rm_file"), *changing], lambda: CHANGES[change](store, reference)

    return begin


class TestKill:
    def runs(self, store: ArtifactStore, change: str) -> list[ArtifactStore]:
        command = [sys.executable, "-c", KILL, root_url(store), change]
        count = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [another(store, f"run{number}") for number in range(1, int(count) + 1)]

    @ON_EACH_KIND_OF_ROOT
    def test_over_another_artifact_it_is_complete_or_absent(self, store: ArtifactStore, tmp_path: Path) -> None:
        found = []
        for run in self.runs(store, "another result"):
            run.clear_abandoned()
            assert [path for path in Path(run.path(INCOMING)).glob("*") if path.is_dir()] == []
            found.append(run.find(FOLDER))
            if found[-1] is not None:
                assert read(run, found[-1], tmp_path / run.run / "found") == FILES
            again = commit(run, rows=5)
            assert run.find(FOLDER) == again
            assert read(run, again, tmp_path / run.run / "again") == FILES
            assert set(contents(run)) == {MANIFEST, *(f"{FOLDER}/{name}" for name in FILES)}
        assert len(found) > 10
        rows = [reference and reference.rows for reference in found]
        assert [rows[0], rows[-1], set(rows)] == [4, 5, {4, None, 5}]

    @pytest.mark.parametrize(
        ("change", "left"),
        [("fewer files", ["part-00000.parquet"]), pytest.param("no files", [], marks=pytest.mark.slow)],
    )
    def test_while_files_are_deleted_it_is_valid(self, local: ArtifactStore, change: str, left: list[str]) -> None:
        reference, runs = commit(local), self.runs(local, change)
        assert len(runs) >= 5
        for run in runs:
            mine = reference.model_copy(update={"uri": f"{run.run}/{FOLDER}"})
            assert restore_artifact(run, mine) == mine
            manifest = run.inspect(run.path(FOLDER))
            begun = manifest.pruned is not None
            assert bool(left_over(run, FOLDER, manifest)) == (begun and run is not runs[-1])
            final = CHANGES[change](run, mine)
            assert restore_artifact(run, mine) == mine
            assert run.find(FOLDER) == final
            finished = run.inspect(run.path(FOLDER))
            assert not left_over(run, FOLDER, finished)
            assert list(finished.files) == left
            assert set(contents(run)) == {MANIFEST, *(f"{FOLDER}/{name}" for name in left)}
            assert moved(run) == []


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@ON_EACH_KIND_OF_ROOT
def test_unfinished_files_of_living_processes_are_left_alone(store: ArtifactStore) -> None:
    with writer_elsewhere(store) as (writer, theirs):
        with store.staging() as ours:
            store.clear_abandoned()
            assert ours.is_dir()
            assert (theirs / "theirs").read_bytes() == b"x"
        writer.kill()
        writer.wait()
        assert theirs.is_dir()
        another(store).clear_abandoned()
        assert not theirs.parent.exists()


LEFT = {"part-00000.parquet": FILES["part-00000.parquet"]}


def test_the_reference_means_what_is_left(store: ArtifactStore, tmp_path: Path) -> None:
    reference = commit(store)
    assert store.pruned_reason(reference) is None
    overwrite(store, f"{FOLDER}/a persons own.txt", b"notes")
    delete(store, reference, [NESTED])
    assert store.find(FOLDER) == reference == restore_artifact(store, reference)
    own = {"a persons own.txt": b"notes"} if "s3" not in store.filesystem.protocol else {}
    assert read(store, reference, tmp_path / "fetched") == {**LEFT, **own}
    assert store.pruned_reason(reference) == PRUNED
    with pytest.raises(StaleReferenceError, match="not eeee"):
        store.pruned_reason(reference.model_copy(update={"sha256": "e" * 64}))
    assert store.reasons == []


@ON_EACH_KIND_OF_ROOT
def test_without_files_it_is_there_and_cannot_be_read(store: ArtifactStore, tmp_path: Path) -> None:
    reference = commit(store)
    delete(store, reference, [NESTED])
    last = {**PRUNED, "removed": "everything"}
    for _ in range(2):
        delete(store, reference, FILES, last)
        assert store.find(FOLDER) == reference == restore_artifact(store, reference)
    with pytest.raises(PrunedArtifactError) as caught:
        store.local_files(reference, tmp_path / "fetched")
    assert isinstance(caught.value, InputError)
    assert (caught.value.place, caught.value.value) == (f"run/{FOLDER}", last)
    assert removed_by(store.pruned_reason(reference)) == ("everything",)
    assert store.path(MANIFEST) in caught.value.hint
    assert set(contents(store)) == {MANIFEST}
    # As the hint says: without its manifest the stage runs again.
    store.filesystem.rm_file(store.path(MANIFEST))
    with pytest.raises(StaleReferenceError, match="missing"):
        restore_artifact(store, reference)
    assert store.pruned_reason(commit(store)) is None


@pytest.mark.parametrize("names", [[NESTED], list(FILES)], ids=["one", "all"])
@ON_EACH_KIND_OF_ROOT
def test_another_run_restores_nothing_that_was_pruned(store: ArtifactStore, tmp_path: Path, names: list[str]) -> None:
    reference, early, late = commit(store), another(store, "early"), another(store, "late")
    home = restore_artifact(early, reference)
    delete(store, reference, names)
    with pytest.raises(StaleReferenceError):
        restore_artifact(late, reference)
    assert late.find(FOLDER) is None
    assert restore_artifact(early, reference) == home
    assert read(early, home, tmp_path / "fetched") == FILES


@pytest.mark.parametrize(
    ("folder", "pruned", "lineage", "evaluation", "comes"),
    [
        (FOLDER, "a", "a", "e", True),
        (FOLDER, "a", "b", "e", False),
        (FOLDER, None, None, "e", False),
        (FOLDER, None, "a", "e", False),
        (FOLDER, "a", None, "e", False),
        # Evaluations depend on the held-out prompts too.
        ("evaluations/000002/rollouts", "a e", "a", "e", True),
        ("evaluations/000002/rollouts", "a e", "a", "f", False),
    ],
)
def test_only_the_configuration_that_was_pruned_restores_it_from_an_earlier_run(
    local: ArtifactStore, folder: str, pruned: str | None, lineage: str | None, evaluation: str, comes: bool
) -> None:
    reference = commit(local, folder)
    delete(local, reference, FILES, {**PRUNED, "lineage": pruned})
    local.give_to("run~1", [f"{folder}.manifest.json"])
    if lineage is not None:
        local.write_file("run.json", dump_checked({"lineage": lineage, "evaluation": evaluation}))
    if not comes:
        with pytest.raises(StaleReferenceError):
            restore_artifact(local, reference)
        assert local.find(folder) is None
        return
    assert restore_artifact(local, reference) == reference == local.find(folder)
    with pytest.raises(PrunedArtifactError) as caught:
        local.local_files(reference)
    assert caught.value.value == PRUNED


def test_only_what_is_valid_is_pruned(local: ArtifactStore) -> None:
    reference = commit(local)
    overwrite(local, PART, b"changed")
    with pytest.raises(StaleReferenceError, match="part-00000"):
        delete(local, reference, [NESTED])
    assert local.pruned_reason(reference) is None
    # What is deleted may be damaged.
    delete(local, reference, FILES)
    assert set(contents(local)) == {MANIFEST}
