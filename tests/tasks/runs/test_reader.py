"""Reading a run changes nothing: what is damaged or lost is named, and another schema version is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.rewards.score_rewards import joined_folder
from tasks.runs import reader as artifact_reader
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
from tasks.runs.reader import RunReader, refuse_lost
from tasks.runs.stored import first_iteration, read_iterations, read_range
from tasks.runs.stored_policies import choose_policy, read_policy
from tasks.storage.artifacts.commit import IMAGES_REMOVED, STATES_REMOVED, delete_files
from tasks.storage.artifacts.store import RUN_FILE, ArtifactStore, lineage_of
from tasks.storage.files import dump_checked, load_checked
from tasks.storage.schemas import SCHEMA_VERSION
from tests.tasks.reports.made_runs import RunMaker, contents, flip_last_byte, whole_run
from tests.tasks.storage.made_artifacts import FOLDER, NESTED, commit

SCORES = "iteration_000001/rewards/ssim"
FILE = f"{SCORES}/scores.parquet"
MANIFEST = f"{SCORES}.manifest.json"


@pytest.fixture
def maker(tmp_path: Path) -> RunMaker:
    maker = RunMaker(tmp_path)
    maker.rewards("iteration_000001", "i000001")
    return maker


def test_finds_and_verifies_what_the_store_committed(maker: RunMaker) -> None:
    reader = RunReader(maker.store)
    found = reader.find(SCORES)
    assert found.reference == maker.store.find(SCORES)
    assert reader.verify(found)
    assert reader.damages == []
    assert reader.find("iteration_000002/rewards/ssim") is None


def test_lists_artifacts_by_their_manifests_and_rounds_by_their_folders(maker: RunMaker) -> None:
    (maker.folder / "iteration_000001/rewards/psnr").mkdir()  # its manifest was not yet written
    maker.iteration(3, rounds=2)
    maker.rollouts("iteration_000003/round_03", "i000003.d03")
    reader = RunReader(maker.store)
    assert reader.artifact_names("iteration_000001/rewards") == ["ssim"]
    assert reader.artifact_names("iteration_000002/rewards") == []
    assert (reader.iterations(), reader.policies(), reader.evaluations()) == ([1, 3], [3], [])
    places = ["iteration_000003", "iteration_000003/round_02", "iteration_000003/round_03"]
    assert reader.rounds("iteration_000003") == places
    assert reader.scored_rounds("iteration_000003") == places[:2]
    assert reader.scored_rounds("iteration_000001") == []


def of_version_99(valid: bytes) -> bytes:
    return dump_checked(load_checked(valid) | {"schema_version": 99})


NO_MANIFESTS = [b"", b"[]", b'{"files": {}}', b'{"files": 3}', b"\xff\xfe", b'{"digest": "x"']


@pytest.mark.parametrize(
    ("place", "content", "named"),
    [
        (FILE, None, FILE),
        (MANIFEST, of_version_99, SCORES),
        *((MANIFEST, content, MANIFEST) for content in NO_MANIFESTS),
    ],
)
def test_damage_that_shows_without_reading_the_files(
    maker: RunMaker, place: str, content: bytes | Callable[[bytes], bytes] | None, named: str
) -> None:
    path = maker.folder / place
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content(path.read_bytes()))
    reader = RunReader(maker.store)
    assert reader.find(SCORES) is None
    assert [damage.place for damage in reader.damages] == [named]


def test_beyond_the_budget_nothing_is_read_but_counted(maker: RunMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_last_byte(maker.folder / FILE)
    monkeypatch.setattr(artifact_reader, "VERIFIED_BYTES", 10)
    reader = RunReader(maker.store)
    found = reader.find(SCORES)
    assert reader.verify_within_budget(found)
    assert reader.unverified == 1
    assert not reader.verify(found)


TABLE = "iteration_000001/rewards/ssim"
SHARD = "iteration_000001/shards/01of02/rewards/ssim"
POLICY = "policies/000001"


@pytest.mark.parametrize(("folder", "needed"), [(TABLE, IMAGES_REMOVED), (POLICY, STATES_REMOVED)])
def test_a_quarantined_artifact_is_named_with_the_last_reason(store: ArtifactStore, folder: str, needed: str) -> None:
    rollouts = commit(store)
    for reason in ("a bit fell", "it was cut short"):
        commit(store, folder)
        store.clear_place(folder, reason=reason)
    # While everything is there it is only made again.
    refuse_lost(store, rollouts, folder, needed)
    by = f"grpo prune --{needed}-older-than 1i"
    delete_files(store, rollouts, [NESTED], pruned={"removed": needed, "by": by, "on": "2026-01-01"})
    (other,) = {IMAGES_REMOVED, STATES_REMOVED} - {needed}
    refuse_lost(store, rollouts, folder, other)
    with pytest.raises(InputError) as caught:
        refuse_lost(store, rollouts, folder, needed)
    assert caught.value.place == f"run/{folder}"
    for word in ("(it was cut short)", f"the {needed} of", FOLDER, by, f"{store.path(folder)}.manifest.json"):
        assert word in caught.value.hint


def test_what_was_never_made_or_moved_with_its_run_is_not_lost(store: ArtifactStore) -> None:
    rollouts = commit(store)
    store.write_file("iteration_000001/rewards/psnr/scores.parquet", b"x")
    store.give_to("run~1", ["iteration_000001"])
    rollouts = commit(store)
    pruned = {"removed": IMAGES_REMOVED, "by": "grpo prune", "on": "2026-01-01"}
    delete_files(store, rollouts, [NESTED], pruned=pruned)
    store.write_file("quarantine/0009-zzz/reason.json", b"[]")
    for folder in (TABLE, "iteration_000001/rewards/psnr"):
        refuse_lost(store, rollouts, folder, IMAGES_REMOVED)


def test_the_table_of_a_shard_is_the_one_that_it_is_joined_to() -> None:
    assert joined_folder(SHARD) == joined_folder(TABLE) == TABLE


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
def described(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(str(tmp_path), "run")
    write_description(store, DESCRIBED, CONFIG)
    assert {name: read_description(store)[name] for name in DESCRIBED} == DESCRIBED
    assert read_config_file(store) == CONFIG
    return store


@pytest.mark.parametrize(("name", "reader"), [(CONFIG_FILE, read_config_file), (RUN_FILE, read_description)])
def test_any_flipped_bit_is_refused(
    described: ArtifactStore, name: str, reader: Callable[[ArtifactStore], object]
) -> None:
    store = described
    valid = store.read_file(name)
    for position in range(0, len(valid), 3):
        store.write_file(name, valid[:position] + bytes([valid[position] ^ 1]) + valid[position + 1 :])
        with pytest.raises(InputError) as caught:
            reader(store)
        assert caught.value.place == f"run/{name}"
        assert lineage_of(store, "policies/000001") == (None if name == RUN_FILE else "a")


def test_a_run_without_a_configuration_is_refused(described: ArtifactStore) -> None:
    described.filesystem.rm_file(described.path(CONFIG_FILE))
    with pytest.raises(InputError) as caught:
        read_config_file(described)
    assert (caught.value.place, caught.value.value) == ("RUN", "run")


def test_every_start_is_a_line_and_a_damaged_line_costs_no_other(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    assert read_starts(RunReader(maker.store)) == ()
    record_start(maker.store, "a processor", {"torch": "1"})
    path = maker.folder / STARTS_FILE
    path.write_text(path.read_text() + '{"at": "2026-01-02T03:04:05Z", "host"\n')
    record_start(maker.store, "a processor", {"torch": "1"})
    reader = RunReader(maker.store)
    first, second = read_starts(reader)
    assert first.host == second.host == json.loads(path.read_text().splitlines()[0])["host"]
    assert first.at <= second.at
    assert [damage.place for damage in reader.damages] == [STARTS_FILE]


BASE = "base" * 16


def test_ranges_of_iterations_and_numbers_in_words() -> None:
    assert (read_range("3-10"), read_range(" 7 ")) == ((3, 10), (7, 7))
    for text in ("0", "2-1", "a", "1-", "1,2", ""):
        with pytest.raises(InputError) as caught:
            read_range(text)
        assert (caught.value.place, caught.value.value) == ("--iterations", text)
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
    found = maker.store.manifest_at(maker.store.path("policies/000001"))
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
