"""Reading a run finds what is damaged and changes nothing; what is lost is named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.rewards.score_rewards import joined_folder
from tasks.runs import reader as artifact_reader
from tasks.runs.reader import RunReader, refuse_lost
from tasks.storage.artifacts.commit import IMAGES_REMOVED, STATES_REMOVED, delete_files
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import dump_checked, load_checked
from tests.tasks.reports.made_runs import RunMaker, flip_last_byte
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
    assert found is not None
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
    assert found is not None
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
