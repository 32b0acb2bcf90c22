"""A run's description and configuration are read only as they were written, and another schema version is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.runs.layout import STORED
from tasks.runs.lookup import (
    CONFIG_FILE,
    LAST_OF_BEFORE,
    STARTS_FILE,
    find_run,
    read_config_file,
    read_description,
    read_starts,
    record_start,
    spans,
    write_description,
)
from tasks.runs.reader import RunReader
from tasks.runs.stored import first_iteration, read_iterations, read_range
from tasks.runs.stored_policies import choose_policy, read_policy
from tasks.storage.artifacts.commit import delete_files
from tasks.storage.artifacts.store import RUN_FILE, ArtifactStore, lineage_of
from tasks.storage.files import dump_checked
from tasks.storage.schemas import SCHEMA_VERSION
from tests.tasks.reports.made_runs import RunMaker, contents, flip_last_byte, whole_run

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


def test_every_start_is_a_line_and_a_damaged_line_costs_no_other(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    assert read_starts(RunReader(maker.store)) == ()
    record_start(maker.store)
    path = maker.folder / STARTS_FILE
    path.write_text(path.read_text() + '{"at": "2026-01-02T03:04:05Z", "host"\n')
    record_start(maker.store)
    reader = RunReader(maker.store)
    first, second = read_starts(reader)
    assert first.host == second.host == json.loads(path.read_text().splitlines()[0])["host"]
    assert first.at <= second.at
    assert [damage.place for damage in reader.damages] == [STARTS_FILE]


BASE = "base" * 16


def test_ranges_of_iterations() -> None:
    assert (read_range("3-10"), read_range(" 7 ")) == ((3, 10), (7, 7))
    for text in ("0", "2-1", "a", "1-", "1,2", ""):
        with pytest.raises(InputError) as caught:
            read_range(text)
        assert (caught.value.place, caught.value.value) == ("--iterations", text)


def test_numbers_in_words() -> None:
    assert [spans(numbers) for numbers in ([], [2], [1, 2, 3, 5, 7, 8])] == ["none", "2", "1 to 3, 5, 7 to 8"]


def test_iterations_with_their_rounds_and_samplers(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, labels=("x", "y"))
    maker.iteration(2, rounds=2)
    maker.iteration(3)
    maker.rollouts("iteration_000004", "i000004")  # without advantages
    second, third = read_iterations(maker.store, None, STORED)
    assert first_iteration(maker.store) == second.number == 2
    assert [each.rollouts.folder for each in second.rounds] == [
        "iteration_000002/rollouts",
        "iteration_000002/round_02/rollouts",
    ]
    assert [list(each.rewards) for each in (*second.rounds, *third.rounds)] == [["x", "y"]] * 3
    assert second.advantages.folder == "iteration_000002/round_02/advantages"
    assert second.samplers == {(0, BASE)}
    assert second.staleness(3) == 3


@pytest.mark.parametrize(
    ("chosen", "advantages", "place", "value"),
    [
        ((2, 9), STORED, "--iterations", "2-9"),
        (None, "storde", "--advantages", "storde"),
        (None, STORED, "made/iteration_000002/rollouts", None),
    ],
)
def test_iterations_that_cannot_be_used(
    tmp_path: Path, chosen: tuple[int, int] | None, advantages: str, place: str, value: str | None
) -> None:
    maker = whole_run(tmp_path)
    if value is None:
        flip_last_byte(maker.folder / "iteration_000002/rollouts/part-00000.parquet")
    before = contents(maker.folder)
    with pytest.raises(InputError) as caught:
        read_iterations(maker.store, chosen, advantages)
    (error,) = caught.value.errors
    assert (error.place, error.value) == (place, value)
    assert contents(maker.folder) == before


def test_a_policy_by_version(tmp_path: Path) -> None:
    store = whole_run(tmp_path).store
    policy, notes = choose_policy(store, 1, BASE)
    assert (policy, notes) == (read_policy(store, 1), ())
    assert (policy.version, policy.digest, policy.checkpoint) == (1, f"{1:064d}", store.find("policies/000001"))
    assert choose_policy(store, None, BASE)[0].version == 2
    base, _ = choose_policy(store, 0, BASE)
    assert (base.version, base.digest, base.checkpoint) == (0, BASE, None)
    assert choose_policy(ArtifactStore(str(tmp_path), "other"), None, BASE) == (base, ())


def test_damaged_pruned_and_missing_policies(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    first = maker.store.find("policies/000001")
    assert first is not None
    found = maker.store.manifest_at(maker.store.path("policies/000001"))
    assert found is not None
    pruned = {"by": "grpo prune --policies-last 1", "on": "2026-01-01"}
    delete_files(maker.store, first, list(found.files), pruned=pruned)
    flip_last_byte(maker.folder / "policies/000002/tokens/adapter_model.safetensors")
    before = contents(maker.folder)
    for version, word in ((1, "grpo prune --policies-last 1` on 2026-01-01"), (2, "sha256"), (7, "versions 2")):
        with pytest.raises(InputError) as caught:
            choose_policy(maker.store, version, BASE)
        (error,) = caught.value.errors
        assert (error.place, error.value) == ("RUN", f"{maker.store.run}@{version}")
        assert word in error.hint
    policy, (note,) = choose_policy(maker.store, None, BASE)
    assert policy.version == 0
    assert "policies/000002/tokens/adapter_model.safetensors" in note
    assert contents(maker.folder) == before
