"""Files deleted from an artifact under a tombstone: every reference to it stays valid, at every moment in between."""

from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.storage.artifacts.reference import PrunedArtifactError, StaleReferenceError
from tasks.storage.artifacts.run_folder import PREVIOUS, QUARANTINE
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.filesystem.files import dump_checked
from tests.tasks.storage.made_artifacts import (
    FEWER,
    FILES,
    FOLDER,
    MANIFEST,
    ON_EACH_KIND_OF_ROOT,
    PART,
    PRUNED,
    another,
    commit,
    contents,
    moved,
    overwrite,
    read,
    replace,
)

SMALLER = {"part-00000.parquet": b"first", "nested/part-00001.bin": FILES["nested/part-00001.bin"]}


@pytest.mark.parametrize("files", [SMALLER, FEWER], ids=["smaller", "fewer"])
def test_both_references_mean_what_is_left(store: ArtifactStore, tmp_path: Path, files: dict[str, bytes]) -> None:
    previous = commit(store)
    assert store.pruned_reason(previous) is None
    overwrite(store, f"{FOLDER}/a persons own.txt", b"notes")
    current = replace(store, previous, files)
    assert current == previous.model_copy(update={"sha256": current.sha256})
    assert current.sha256 != previous.sha256
    assert store.find(FOLDER) == current
    own = {"a persons own.txt": b"notes"} if "s3" not in store.filesystem.protocol else {}
    for number, reference in enumerate((previous, current)):
        assert store.restore_artifact(reference) == reference
        assert read(store, reference, tmp_path / f"fetched-{number}") == {**files, **own}
        assert store.pruned_reason(reference) == PRUNED
    with pytest.raises(StaleReferenceError, match="not eeee"):
        store.pruned_reason(previous.model_copy(update={"sha256": "e" * 64}))
    assert store.reasons == []


def test_without_files_it_is_there_and_cannot_be_read(store: ArtifactStore, tmp_path: Path) -> None:
    previous = commit(store)
    current = replace(store, previous, None)
    for reference in (previous, current):
        assert store.restore_artifact(reference) == reference
        with pytest.raises(PrunedArtifactError) as caught:
            store.local_files(reference, tmp_path / "fetched")
        assert isinstance(caught.value, InputError)
        assert (caught.value.place, caught.value.value) == (f"run/{FOLDER}", PRUNED)
        assert store.path(MANIFEST) in caught.value.hint
    assert store.find(FOLDER) == current
    assert set(contents(store)) == {MANIFEST}
    # As the hint says: without its manifest the stage runs again.
    store.filesystem.rm_file(store.path(MANIFEST))
    with pytest.raises(StaleReferenceError, match="missing"):
        store.restore_artifact(previous)


def test_replaced_again_and_again(store: ArtifactStore, tmp_path: Path) -> None:
    references = [commit(store)]
    references.append(replace(store, references[0], SMALLER))
    references.append(replace(store, references[0], FEWER))
    references.append(replace(store, references[1], None))
    assert replace(store, references[2], None) == references[3]
    assert [store.restore_artifact(reference) for reference in references] == references
    with pytest.raises(PrunedArtifactError):
        store.local_files(references[0], tmp_path / "fetched")
    again = commit(store)
    assert store.pruned_reason(again) is None
    assert store.find(FOLDER) == again


@pytest.mark.parametrize("files", [FEWER, None], ids=["fewer", "none"])
@ON_EACH_KIND_OF_ROOT
def test_another_run_restores_nothing_that_was_pruned(
    store: ArtifactStore, tmp_path: Path, files: dict[str, bytes] | None
) -> None:
    previous, early, late = commit(store), another(store, "early"), another(store, "late")
    home = early.restore_artifact(previous)
    for reference in (previous, replace(store, previous, files)):
        with pytest.raises(StaleReferenceError):
            late.restore_artifact(reference)
    assert late.find(FOLDER) is None
    assert early.restore_artifact(previous) == home
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
def test_only_the_configuration_that_was_pruned_restores_it_from_previous(
    local: ArtifactStore, folder: str, pruned: str | None, lineage: str | None, evaluation: str, comes: bool
) -> None:
    previous = commit(local, folder)
    kept = replace(local, previous, None, {**PRUNED, "lineage": pruned})
    local.move_to_previous([f"{folder}.manifest.json", folder], reason="the configuration changed")
    if lineage is not None:
        local.write_file("run.json", dump_checked({"lineage": lineage, "evaluation": evaluation}))
    if not comes:
        with pytest.raises(StaleReferenceError):
            local.restore_artifact(previous)
        assert local.find(folder) is None
        return
    assert local.restore_artifact(previous) == previous
    assert local.find(folder) == kept
    with pytest.raises(PrunedArtifactError) as caught:
        local.local_files(previous)
    assert "lineage" not in str(caught.value)
    manifests = [local.path(f"{folder}.manifest.json"), *local.filesystem.glob(local.path(f"{PREVIOUS}/*/{folder}.m*"))]
    assert len(manifests) == 2
    # As the hint says.
    for path in manifests:
        assert path in caught.value.hint
        local.filesystem.rm_file(path)
    with pytest.raises(StaleReferenceError):
        local.restore_artifact(previous)


class TestDamagedTombstone:
    """Nothing else says that the files were deleted on purpose."""

    @pytest.mark.parametrize("files", [FEWER, None], ids=["fewer", "none"])
    @ON_EACH_KIND_OF_ROOT
    def test_its_copy_takes_its_place(
        self, store: ArtifactStore, tmp_path: Path, files: dict[str, bytes] | None
    ) -> None:
        previous = commit(store)
        references = [previous, replace(store, previous, files)]
        valid = contents(store)[MANIFEST]
        flips = [bytes([*valid[:at], valid[at] ^ 1, *valid[at + 1 :]]) for at in range(0, len(valid), 97)]
        damages = [*flips, b"", valid[:-1], b"\xff", b"[]", b'{"checksum": 1}']
        for number, damaged in enumerate(damages):
            overwrite(store, MANIFEST, damaged)
            assert store.find(FOLDER) is None
            reference = references[number % 2]
            if files is None or number % 3:
                assert store.restore_artifact(reference) == reference
            else:
                assert read(store, reference, tmp_path / f"fetched-{number}") == files
            assert contents(store)[MANIFEST] == valid
            (copy,) = store.filesystem.glob(store.path(f"{QUARANTINE}/{number + 1:04d}-*/{MANIFEST}"))
            assert store.filesystem.cat_file(copy) == damaged
        assert store.find(FOLDER) == references[1]
        assert len(store.reasons) == len(moved(store, QUARANTINE)) == len(damages)

    @pytest.mark.parametrize("copy", ["damaged", "another's", "missing", "valid, but a file is damaged"])
    def test_a_copy_that_does_not_fit_is_not_used(self, local: ArtifactStore, copy: str) -> None:
        reference = commit(local)
        replace(local, reference, FEWER if "file" in copy else None)
        place = f".pruned/{FOLDER}.json"
        if copy == "missing":
            local.filesystem.rm_file(local.path(place))
        elif copy == "damaged":
            overwrite(local, place, local.filesystem.cat_file(local.path(place))[:-2])
        elif copy == "another's":
            local.clear_place(FOLDER)
            reference = commit(local, rows=5)
        else:
            overwrite(local, PART, b"wrong")
        overwrite(local, MANIFEST, b"{")
        with pytest.raises(StaleReferenceError, match="damaged"):
            local.restore_artifact(reference)
        assert local.find(FOLDER) is None


def test_only_a_valid_artifact_is_replaced_and_by_nothing_new(store: ArtifactStore, tmp_path: Path) -> None:
    reference = commit(store)
    with pytest.raises(ValueError, match="extra"):
        replace(store, reference, {**SMALLER, "extra": b"x"})
    replace(store, reference, SMALLER)
    overwrite(store, PART, b"changed")
    with pytest.raises(StaleReferenceError, match="part-00000"):
        replace(store, reference, FEWER)
    with pytest.raises(StaleReferenceError, match="part-00000"):
        store.local_files(reference, tmp_path / "fetched")
