"""Damage in every file of an artifact: noticed by name, set aside, and made up for."""

from pathlib import Path

import pytest

from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.storage import made_artifacts as artifacts
from tests.tasks.storage.made_artifacts import FILES, FOLDER, commit, flip, reasons

store = artifacts.store


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "flipped": flip,
    "truncated": truncate,
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
}
PLACES = [*(f"{FOLDER}/{name}" for name in FILES), f"{FOLDER}.manifest.json"]


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES)
    @pytest.mark.parametrize("place", PLACES)
    def test_reader_names_the_file_and_sets_the_artifact_aside(
        self, store: ArtifactStore, place: str, damage: str
    ) -> None:
        reference = commit(store)
        DAMAGES[damage](Path(store.path(place)))
        name = place.removeprefix(f"{FOLDER}/").rsplit("iteration_000001/", 1)[-1]
        with pytest.raises(StaleReferenceError, match=name):
            store.local_files(reference)
        assert store.find(FOLDER) is None
        assert [name in reason for reason in reasons(store)] == [True]
        assert not Path(store.path(FOLDER)).exists()

    @pytest.mark.parametrize("damage", DAMAGES)
    @pytest.mark.parametrize("place", PLACES)
    def test_damaged_artifact_does_not_come_home(self, store: ArtifactStore, place: str, damage: str) -> None:
        reference = commit(store)
        DAMAGES[damage](Path(store.path(place)))
        name = place.removeprefix(f"{FOLDER}/").rsplit("iteration_000001/", 1)[-1]
        with pytest.raises(StaleReferenceError, match=name):
            store.restore_artifact(reference)
        assert [name in reason for reason in reasons(store)] == [True]
        again = commit(store)
        assert store.restore_artifact(again) == again
        assert len(reasons(store)) == 1  # the damaged one was already out of the way

    def test_every_flipped_bit_of_a_manifest_is_noticed(self, store: ArtifactStore) -> None:
        reference = commit(store)
        manifest = Path(store.path(f"{FOLDER}.manifest.json"))
        whole = manifest.read_bytes()
        for position in range(len(whole)):
            changed = bytearray(whole)
            changed[position] ^= 1 << (position % 8)
            manifest.write_bytes(changed)
            assert store.find(FOLDER) is None
        manifest.write_bytes(whole)
        assert store.find(FOLDER) == reference

    def test_damaged_artifact_is_healed_from_another_runs_copy(self, store: ArtifactStore) -> None:
        reference = commit(store)
        other = ArtifactStore(store.root, "other")
        other.restore_artifact(reference)
        flip(Path(other.path(f"{FOLDER}/part-00000.parquet")))
        home = other.restore_artifact(reference)
        assert home.uri == f"other/{FOLDER}"
        assert Path(other.path(f"{FOLDER}/part-00000.parquet")).read_bytes() == FILES["part-00000.parquet"]
        assert ["part-00000.parquet has sha256" in reason for reason in reasons(other)] == [True]
