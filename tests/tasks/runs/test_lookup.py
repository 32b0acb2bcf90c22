"""A run's description and configuration are read only as they were written, and another schema version is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.runs.lookup import (
    CONFIG_FILE,
    LAST_OF_BEFORE,
    find_run,
    read_config_file,
    read_description,
    write_description,
)
from tasks.storage.artifacts.store import RUN_FILE, ArtifactStore, lineage_of
from tasks.storage.filesystem.files import dump_checked
from tasks.storage.tables.schemas import SCHEMA_VERSION
from tests.tasks.reports.made_runs import contents, whole_run

DESCRIBED = {"lineage": "a", "evaluation": None, "schema_version": 4}
CONFIG = b"run:\n  name: run\nupdate:\n  learning_rate: 0.001\n"


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_schema_version_is_refused_and_not_a_byte_changes(tmp_path: Path, version: int) -> None:
    maker = whole_run(tmp_path)
    (maker.folder / RUN_FILE).write_bytes(dump_checked({"schema_version": version}))
    before = contents(maker.folder)
    with pytest.raises(InputError) as caught:
        find_run("made", str(tmp_path))
    assert (caught.value.place, caught.value.value) == ("made/run.json", f"schema version {version}")
    assert (LAST_OF_BEFORE in caught.value.hint) == (version < SCHEMA_VERSION)
    assert contents(maker.folder) == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b'{"checksum": "0", "schema_version": 99}'])
def test_a_damaged_description_is_not_taken_for_another_version(tmp_path: Path, content: bytes) -> None:
    maker = whole_run(tmp_path)
    (maker.folder / RUN_FILE).write_bytes(content)
    assert find_run("made", str(tmp_path)).run == "made"


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(str(tmp_path), "run")
    write_description(store, DESCRIBED, CONFIG)
    assert {name: read_description(store)[name] for name in DESCRIBED} == DESCRIBED
    assert read_config_file(store) == CONFIG
    return store


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
        assert lineage_of(store, "policies/000001") == (None if name == RUN_FILE else "a")


def test_a_run_without_a_configuration_is_refused(store: ArtifactStore) -> None:
    store.filesystem.rm_file(store.path(CONFIG_FILE))
    with pytest.raises(InputError) as caught:
        read_config_file(store)
    assert (caught.value.place, caught.value.value) == ("RUN", "run")
