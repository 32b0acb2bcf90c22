"""Files deleted from an artifact under a tombstone: every reference to it stays valid, at every moment in between."""

from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.storage.artifacts.commit import removed_by
from tasks.storage.artifacts.reference import PrunedArtifactError, StaleReferenceError
from tasks.storage.artifacts.restore import restore_artifact
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import dump_checked
from tests.tasks.storage.made_artifacts import (
    FILES,
    FOLDER,
    MANIFEST,
    NESTED,
    ON_EACH_KIND_OF_ROOT,
    PART,
    PRUNED,
    another,
    commit,
    contents,
    delete,
    overwrite,
    read,
)

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
