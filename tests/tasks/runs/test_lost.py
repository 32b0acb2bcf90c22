"""Artifacts that would have to be made again after what they are made of was pruned."""

import pytest

from grpo_core.errors import InputError
from tasks.rewards.stored import joined_folder
from tasks.runs.lost import refuse_lost
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.artifacts.tombstones import IMAGES_REMOVED, STATES_REMOVED, replace_artifact
from tests.tasks.storage.made_artifacts import FOLDER, commit

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
    with store.staging() as staged:
        (staged / "part-00000.parquet").write_bytes(b"less")
        replace_artifact(store, rollouts, staged, pruned={"removed": needed, "by": by, "on": "2026-01-01"})
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
    store.move_to_previous(["iteration_000001"], reason="the configuration changed")
    rollouts = commit(store)
    replace_artifact(store, rollouts, None, pruned={"removed": IMAGES_REMOVED, "by": "grpo prune", "on": "2026-01-01"})
    store.write_file("quarantine/0009-zzz/reason.json", b"[]")
    for folder in (TABLE, "iteration_000001/rewards/psnr"):
        refuse_lost(store, rollouts, folder, IMAGES_REMOVED)


def test_the_table_of_a_shard_is_the_one_that_it_is_joined_to() -> None:
    assert joined_folder(SHARD) == joined_folder(TABLE) == TABLE
