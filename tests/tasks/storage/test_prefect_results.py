"""The record of a finished stage: kept in the run and next to the runs, decoded by the codec alone."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.results import ResultRecord, ResultRecordMetadata
from prefect.serializers import PickleSerializer

from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef, StaleReferenceError
from tasks.storage.artifacts.run_folder import QUARANTINE
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tasks.storage.files import dump_checked
from tasks.storage.prefect_results import FOLDER, StageRecords, encode_reference, reference_serializer
from tests.tasks.storage.made_artifacts import commit

KEY = "collect-rollouts-" + "a" * 64


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(str(tmp_path), "run")
    use_store(store)
    return store


def write(key: str, reference: ArtifactRef | PolicyRef) -> None:
    metadata = ResultRecordMetadata(serializer=reference_serializer(), storage_key=key)
    StageRecords().write_path(key, ResultRecord(metadata=metadata, result=reference).serialize())


def read(key: str) -> ArtifactRef | PolicyRef:
    record: ResultRecord[ArtifactRef | PolicyRef] = ResultRecord.deserialize(StageRecords().read_path(key))
    return record.result


def own(store: ArtifactStore) -> Path:
    return Path(store.path(f"{FOLDER}/{KEY}.json"))


def test_references_come_back_from_their_records(store: ArtifactStore) -> None:
    with pytest.raises(StaleReferenceError):
        read(KEY)
    reference = commit(store)
    policy = PolicyRef(version=1, digest="e" * 64, checkpoint=commit(store, "policies/000001"))
    for recorded in (reference, policy, PolicyRef(version=0, digest="f" * 64)):
        write(KEY, recorded)
        assert read(KEY) == recorded
    with pytest.raises(TypeError):
        encode_reference(object())


def test_another_run_of_the_root_finds_the_record_and_keeps_its_own(store: ArtifactStore) -> None:
    reference = commit(store)
    write(KEY, reference)
    other = ArtifactStore(store.root, "other")
    use_store(other)
    assert read(KEY) == reference.model_copy(update={"uri": f"other/{reference.folder}"})
    assert own(other).read_bytes() == own(store).read_bytes()


def test_damaged_record_is_healed_from_the_shared_one(store: ArtifactStore) -> None:
    reference = commit(store)
    write(KEY, reference)
    valid = own(store).read_bytes()
    own(store).write_bytes(valid[:-1])
    assert read(KEY) == reference
    assert own(store).read_bytes() == valid


def test_record_of_another_key_is_refused(store: ArtifactStore) -> None:
    write(KEY, commit(store))
    other = KEY.replace("a", "b")
    own(store).rename(own(store).with_name(f"{other}.json"))
    with pytest.raises(StaleReferenceError):
        StageRecords().read_path(other)
    (note,) = Path(store.path(QUARANTINE)).glob("*/reason.json")
    assert f"{other}.json is not the record" in json.loads(note.read_text())["reason"]


class _Bomb:
    """Unpickled, it makes a file in the working directory."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("exploded",)


def test_no_record_chooses_its_decoder(store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metadata = ResultRecordMetadata(serializer=PickleSerializer(picklelib="pickle"), storage_key=KEY)
    bomb = ResultRecord(metadata=metadata, result=_Bomb()).serialize()
    ResultRecord.deserialize(bomb)
    assert (tmp_path / "exploded").exists()  # Prefect's own reader runs it
    (tmp_path / "exploded").rmdir()
    # The second has its checksum.
    for record in (bomb, dump_checked({"key": KEY, "result": json.loads(bomb)})):
        for place in (own(store), tmp_path / FOLDER / f"{KEY}.json"):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(record)
        with pytest.raises(StaleReferenceError, match="not the record that was written"):
            read(KEY)
    reference = {**encode_reference(commit(store)), **json.loads(bomb)}
    own(store).write_bytes(dump_checked({"key": KEY, "result": reference}))
    assert isinstance(read(KEY), ArtifactRef)
    assert not (tmp_path / "exploded").exists()


def test_shared_record_that_was_lost_half_written_is_made_again(store: ArtifactStore, tmp_path: Path) -> None:
    reference = commit(store)
    write(KEY, reference)
    shared = tmp_path / FOLDER / f"{KEY}.json"
    valid = shared.read_bytes()
    shared.write_bytes(b"")
    use_store(ArtifactStore(store.root, "other"))
    with pytest.raises(StaleReferenceError, match="is not the record that was written"):
        read(KEY)
    use_store(store)
    assert read(KEY) == reference
    write(KEY, reference)
    assert shared.read_bytes() == valid
