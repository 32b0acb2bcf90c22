"""A run's description and configuration are read only as they were written."""

from collections.abc import Callable
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


@pytest.mark.parametrize(("name", "reader"), [(CONFIG_FILE, read_config_file), (RUN_FILE, read_description)])
def test_a_flipped_bit_anywhere_is_refused(
    store: ArtifactStore, name: str, reader: Callable[[ArtifactStore], object]
) -> None:
    valid = store.read_file(name)
    assert valid is not None
    for position in range(len(valid)):
        store.write_file(name, valid[:position] + bytes([valid[position] ^ 1]) + valid[position + 1 :])
        with pytest.raises(InputError) as caught:
            reader(store)
        assert caught.value.place == f"run/{name}"
        assert lineage_of(store) == (None if name == RUN_FILE else "a")


def test_a_run_without_a_configuration_is_refused(store: ArtifactStore) -> None:
    store.filesystem.rm_file(store.path(CONFIG_FILE))
    with pytest.raises(InputError) as caught:
        read_config_file(store)
    assert (caught.value.place, caught.value.value) == ("RUN", "run")
