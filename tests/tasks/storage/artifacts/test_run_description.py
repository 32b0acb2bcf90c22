"""What a run says of itself is believed only as it was written."""

from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.storage.artifacts.run_description import (
    CONFIG_FILE,
    RUN_FILE,
    read_config_file,
    read_description,
    write_description,
)
from tasks.storage.artifacts.store import ArtifactStore, lineage_of

DESCRIBED = {"lineage": "a", "evaluation": None, "schema_version": 4}
CONFIG = b"run:\n  name: run\nupdate:\n  learning_rate: 0.001\n"


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(str(tmp_path), "run")
    write_description(store, DESCRIBED, CONFIG)
    return store


def test_both_are_read_as_they_were_written(store: ArtifactStore) -> None:
    assert {name: read_description(store)[name] for name in DESCRIBED} == DESCRIBED
    assert read_config_file(store) == CONFIG


def test_a_flipped_bit_anywhere_in_the_configuration_is_told(store: ArtifactStore) -> None:
    for position in range(len(CONFIG)):
        flipped = CONFIG[:position] + bytes([CONFIG[position] ^ 1]) + CONFIG[position + 1 :]
        store.write_file(CONFIG_FILE, flipped)
        with pytest.raises(
            InputError, match=r"run/config\.yaml: got 'sha256 .*not what the run wrote.*its own command"
        ):
            read_config_file(store)


def test_a_flipped_bit_anywhere_in_the_description_is_told(store: ArtifactStore) -> None:
    whole = store.read_file(RUN_FILE)
    assert whole is not None
    refused = []
    for position in range(len(whole)):
        store.write_file(RUN_FILE, whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            read_description(store)
        except InputError as error:
            refused.append((error.place, error.hint, lineage_of(store)))
    assert len(refused) == len(whole)
    assert {(place, lineage) for place, _, lineage in refused} == {("run/run.json", None)}


def test_a_run_without_a_configuration_is_told(store: ArtifactStore) -> None:
    store.filesystem.rm_file(store.path(CONFIG_FILE))
    with pytest.raises(InputError, match=r"RUN: got 'run'\. It has no config\.yaml"):
        read_config_file(store)
