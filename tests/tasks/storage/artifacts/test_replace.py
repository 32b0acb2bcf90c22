"""Files taken away from an artifact: what refers to it stays right, at every moment in between."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from grpo_core.errors import InputError
from tasks.storage.artifacts.reference import ArtifactRef, StaleReferenceError
from tasks.storage.artifacts.replace import PrunedArtifactError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.filesystem.checked_json import dump_checked
from tests.tasks.storage.made_artifacts import FILES, FOLDER, REPOSITORY, commit, reasons

PRUNED = {"removed": "images", "older_than_days": 30}
SMALLER = {"part-00000.parquet": b"first", "nested/part-00001.bin": FILES["nested/part-00001.bin"]}


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ArtifactStore]:
    yield ArtifactStore(str(tmp_path) if request.param == "local" else "memory://succession", "run")
    memory = fsspec.filesystem("memory")
    if memory.exists("/succession"):
        memory.rm("/succession", recursive=True)


def replace_artifact(store: ArtifactStore, reference: ArtifactRef, files: dict[str, bytes] | None) -> ArtifactRef:
    if files is None:
        return store.replace_artifact(reference, None, pruned=PRUNED)
    with store.staging() as staged:
        for name, content in files.items():
            (staged / name).parent.mkdir(exist_ok=True)
            (staged / name).write_bytes(content)
        return store.replace_artifact(reference, staged, pruned=PRUNED)


def read(store: ArtifactStore, reference: ArtifactRef, folder: Path) -> dict[str, bytes]:
    local = store.local_files(reference, folder)
    return {path.relative_to(local).as_posix(): path.read_bytes() for path in local.rglob("*") if path.is_file()}


@pytest.mark.parametrize("files", [SMALLER, {"part-00000.parquet": b"first"}], ids=["replaced", "fewer"])
def test_both_references_mean_what_is_left(store: ArtifactStore, tmp_path: Path, files: dict[str, bytes]) -> None:
    previous = commit(store)
    present = replace_artifact(store, previous, files)
    assert present == previous.model_copy(update={"sha256": present.sha256})
    assert present.sha256 != previous.sha256
    assert store.find(FOLDER) == present
    for number, reference in enumerate((previous, present)):
        assert store.restore_artifact(reference) == reference
        assert read(store, reference, tmp_path / f"fetched-{number}") == files
        assert store.pruned_reason(reference) == PRUNED
    assert store.reasons == []


def test_nothing_was_taken_away_from_what_its_stage_made(store: ArtifactStore) -> None:
    reference = commit(store)
    assert store.pruned_reason(reference) is None
    with pytest.raises(StaleReferenceError, match="not eeee"):
        store.pruned_reason(reference.model_copy(update={"sha256": "e" * 64}))


def test_without_files_it_is_there_and_cannot_be_read(store: ArtifactStore, tmp_path: Path) -> None:
    previous = commit(store)
    present = replace_artifact(store, previous, None)
    for reference in (previous, present):
        assert store.restore_artifact(reference) == reference
        with pytest.raises(PrunedArtifactError, match=r"run/iteration_000001/rollouts.*images.*grpo prune") as caught:
            store.local_files(reference, tmp_path / "fetched")
        assert isinstance(caught.value, InputError)
    assert store.find(FOLDER) == present
    assert store.filesystem.find(store.path(FOLDER)) == []
    # As its message says: without its manifest the stage is done again.
    store.filesystem.rm_file(store.path(f"{FOLDER}.manifest.json"))
    with pytest.raises(StaleReferenceError):
        store.restore_artifact(previous)


def test_a_succession_of_successions(store: ArtifactStore, tmp_path: Path) -> None:
    references = [commit(store)]
    references.append(replace_artifact(store, references[0], SMALLER))
    references.append(replace_artifact(store, references[0], {"part-00000.parquet": b"first"}))
    references.append(replace_artifact(store, references[1], None))
    assert replace_artifact(store, references[2], None) == references[3]
    assert [store.restore_artifact(reference) for reference in references] == references
    with pytest.raises(PrunedArtifactError):
        store.local_files(references[0], tmp_path / "fetched")


@pytest.mark.parametrize("files", [{"part-00000.parquet": b"first"}, None], ids=["fewer", "none"])
def test_another_run_takes_nothing_that_was_pruned(
    store: ArtifactStore, tmp_path: Path, files: dict[str, bytes] | None
) -> None:
    previous = commit(store)
    root = "memory://succession" if "/succession" in store.root else store.root
    early, late = (ArtifactStore(root, name) for name in ("early", "late"))
    home = early.restore_artifact(previous)
    present = replace_artifact(store, previous, files)
    for reference in (previous, present):
        with pytest.raises(StaleReferenceError):
            late.restore_artifact(reference)
    assert late.find(FOLDER) is None
    assert early.restore_artifact(previous) == home
    assert read(early, home, tmp_path / "fetched") == FILES


@pytest.mark.parametrize(
    ("pruned", "present", "comes"),
    [("a", "a", True), ("a", "b", False), (None, None, False), (None, "a", False), ("a", None, False)],
)
def test_what_was_pruned_comes_back_from_where_it_was_set_aside_to_the_same_lineage_alone(
    store: ArtifactStore, pruned: str | None, present: str | None, comes: bool, tmp_path: Path
) -> None:
    previous = commit(store)
    kept = store.replace_artifact(previous, None, pruned={**PRUNED, "lineage": pruned})
    store.set_aside([f"{FOLDER}.manifest.json", FOLDER], reason="the configuration changed")
    if present is not None:
        store.write_file("run.json", dump_checked({"lineage": present, "evaluation": "e"}))
    if not comes:
        # A stage of another configuration may need what it lacks.
        with pytest.raises(StaleReferenceError):
            store.restore_artifact(previous)
        assert store.find(FOLDER) is None
        return
    assert store.restore_artifact(previous) == previous
    assert store.find(FOLDER) == kept
    with pytest.raises(PrunedArtifactError, match=r"remove \S+ and \S+/set_aside/\S+ and start") as caught:
        store.local_files(previous, tmp_path / "fetched")
    assert "lineage" not in str(caught.value)
    # As its message says.
    for path in (store.path(f"{FOLDER}.manifest.json"), *store.filesystem.glob(store.path(f"set_aside/*/{FOLDER}.m*"))):
        store.filesystem.rm_file(path)
    with pytest.raises(StaleReferenceError):
        store.restore_artifact(previous)


def test_pruned_evaluations_come_back_for_the_same_held_out_prompts_alone(store: ArtifactStore) -> None:
    folder = "evaluations/000002/rollouts"
    previous = commit(store, folder)
    store.replace_artifact(previous, None, pruned={**PRUNED, "lineage": "a e"})
    store.set_aside([f"{folder}.manifest.json", folder], reason="the held-out prompts changed")
    store.write_file("run.json", dump_checked({"lineage": "a", "evaluation": "f"}))
    with pytest.raises(StaleReferenceError):
        store.restore_artifact(previous)
    store.write_file("run.json", dump_checked({"lineage": "a", "evaluation": "e"}))
    assert store.restore_artifact(previous) == previous


class TestManifestOfWhatWasPruned:
    """Nothing but it says that the files are gone on purpose."""

    @pytest.mark.parametrize("files", [{"part-00000.parquet": b"first"}, None], ids=["fewer", "none"])
    def test_damaged_at_any_place_its_copy_takes_its_place(
        self, store: ArtifactStore, tmp_path: Path, files: dict[str, bytes] | None
    ) -> None:
        previous = commit(store)
        present = replace_artifact(store, previous, files)
        path = store.path(f"{FOLDER}.manifest.json")
        whole = store.filesystem.cat_file(path)
        flips = [bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]) for at in range(0, len(whole), 41)]
        damages = [*flips, b"", whole[:-1], whole[: len(whole) // 2], b"\xff", b"[]", b'{"seal": 1}']
        for number, (damaged, reference) in enumerate(zip(damages, [previous, present] * len(damages), strict=False)):
            store.filesystem.pipe_file(path, damaged)
            assert store.find(FOLDER) is None
            if files is None or number % 3:
                assert store.restore_artifact(reference) == reference
            else:
                assert read(store, reference, tmp_path / f"fetched-{number}") == files
            assert store.filesystem.cat_file(path) == whole
            assert store.reasons[-1].startswith(f"{FOLDER}.manifest.json: {FOLDER}.manifest.json is damaged; .pruned/")
            (aside,) = store.filesystem.glob(store.path(f"set_aside/{number + 1:04d}-*/{FOLDER}.manifest.json"))
            assert store.filesystem.cat_file(aside) == damaged
        assert store.find(FOLDER) == present
        assert len(store.reasons) == len(damages)

    def test_missing_it_is_to_be_made_again(self, store: ArtifactStore) -> None:
        previous = commit(store)
        replace_artifact(store, previous, None)
        store.filesystem.rm_file(store.path(f"{FOLDER}.manifest.json"))
        with pytest.raises(StaleReferenceError, match="missing"):
            store.restore_artifact(previous)

    @pytest.mark.parametrize("other", ["damaged", "another", "missing"])
    def test_a_copy_that_is_damaged_or_of_another_artifact_is_not_taken(self, store: ArtifactStore, other: str) -> None:
        reference = commit(store)
        replace_artifact(store, reference, None)
        copy = store.path(f".pruned/{FOLDER}.json")
        if other == "missing":
            store.filesystem.rm_file(copy)
        elif other == "damaged":
            store.filesystem.pipe_file(copy, store.filesystem.cat_file(copy)[:-2])
        else:
            store.clear_place(FOLDER)
            reference = commit(store, rows=5)
        store.filesystem.pipe_file(store.path(f"{FOLDER}.manifest.json"), b"{")
        with pytest.raises(StaleReferenceError, match="damaged"):
            store.restore_artifact(reference)
        assert store.find(FOLDER) is None

    def test_files_that_are_left_are_held_against_the_copy(self, store: ArtifactStore) -> None:
        previous = commit(store)
        replace_artifact(store, previous, SMALLER)
        store.filesystem.pipe_file(store.path(f"{FOLDER}.manifest.json"), b"{")
        store.filesystem.pipe_file(store.path(f"{FOLDER}/part-00000.parquet"), b"wrong")
        with pytest.raises(StaleReferenceError, match="damaged"):
            store.restore_artifact(previous)


def test_only_what_is_whole_is_succeeded_and_by_nothing_new(store: ArtifactStore) -> None:
    reference = commit(store)
    with pytest.raises(ValueError, match="has no extra"):
        replace_artifact(store, reference, {**SMALLER, "extra": b"x"})
    store.filesystem.pipe_file(store.path(f"{FOLDER}/part-00000.parquet"), b"changed")
    with pytest.raises(StaleReferenceError, match="part-00000"):
        replace_artifact(store, reference, SMALLER)


def test_a_changed_file_of_what_is_left_is_noticed(store: ArtifactStore, tmp_path: Path) -> None:
    previous = commit(store)
    replace_artifact(store, previous, SMALLER)
    # As it was before is as wrong as anything else, once the succession is over.
    store.filesystem.pipe_file(store.path(f"{FOLDER}/part-00000.parquet"), FILES["part-00000.parquet"])
    with pytest.raises(StaleReferenceError, match="part-00000"):
        store.local_files(previous, tmp_path / "fetched")


def test_the_same_result_again_does_not_take_the_place_of_what_was_pruned_unless_asked(store: ArtifactStore) -> None:
    previous = commit(store)
    replace_artifact(store, previous, None)
    again = commit(store)
    assert store.pruned_reason(again) is None
    assert store.find(FOLDER) == again


KILLED = """
import os, signal, sys
from tasks.storage.artifacts import replace as succession
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.storage.artifacts.test_replace import SMALLER, replace_artifact

root, kind = sys.argv[1:]
STEPS = ("write_manifest", "_replace", "_remove")

def count_down(number):
    def counted(real):
        def step(*arguments):
            count_down.left -= 1
            if count_down.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)
        return step
    count_down.left = number
    for name in STEPS:
        setattr(succession, name, counted(getattr(succession, name)))

number = 0
while True:
    number += 1
    pid = os.fork()
    if pid == 0:
        store = ArtifactStore(root, f"run{number}")
        reference = store.find("iteration_000001/rollouts")
        count_down(number)
        replace_artifact(store, reference, {"fewer": dict(list(SMALLER.items())[:1]), "none": None}[kind])
        os._exit(0)
    if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
        break
    print(number, flush=True)
"""


@pytest.mark.parametrize("kind", ["fewer", "none"])
def test_kill_at_every_step_leaves_it_whole_and_again_finishes_it(tmp_path: Path, kind: str) -> None:
    made = ArtifactStore(str(tmp_path / "runs"), "run")
    reference = commit(made)
    for number in range(1, 9):
        shutil.copytree(made.path(), tmp_path / "runs" / f"run{number}")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "runs"), kind]
    told = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    assert told.split() == ["1", "2", "3", "4"]
    left = {"fewer": dict(list(SMALLER.items())[:1]), "none": None}[kind]
    for number in (1, 2, 3, 4):
        store = ArtifactStore(made.root, f"run{number}")
        mine = reference.model_copy(update={"uri": f"run{number}/{FOLDER}"})
        assert store.restore_artifact(mine) == mine
        if kind == "fewer":
            found = read(store, mine, tmp_path / "unused")
            assert found["part-00000.parquet"] in (FILES["part-00000.parquet"], b"first")
        final = replace_artifact(store, mine, left)
        assert store.restore_artifact(mine) == mine
        assert store.find(FOLDER) == final
        manifest = json.loads(Path(store.path(f"{FOLDER}.manifest.json")).read_bytes())
        assert "leaving" not in manifest
        present = {path.name for path in Path(store.path(FOLDER)).rglob("*") if path.is_file()}
        assert present == (set() if left is None else {"part-00000.parquet"})
        assert reasons(store) == []
