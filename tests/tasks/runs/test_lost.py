"""Scores that would have to be computed again after the images were deleted."""

import pytest

from grpo_core.errors import InputError
from tasks.rewards.stored import refuse_lost_scores
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.artifacts.tombstones import replace_artifact
from tests.tasks.storage.made_artifacts import FOLDER, commit

TABLE = "iteration_000001/rewards/ssim"
SHARD = "iteration_000001/shards/01of02/rewards/ssim"
PRUNED = {"removed": "images", "by": "grpo prune --images-older-than 1i", "on": "2026-01-01"}


@pytest.mark.parametrize("folder", [TABLE, SHARD])
def test_a_quarantined_table_is_named_with_the_last_reason(store: ArtifactStore, folder: str) -> None:
    rollouts = commit(store)
    for reason in ("a bit fell", "it was cut short"):
        commit(store, TABLE)
        store.clear_place(TABLE, reason=reason)
    # While there are images it is only made again.
    refuse_lost_scores(store, rollouts, folder)
    with store.staging() as staged:
        (staged / "part-00000.parquet").write_bytes(b"less")
        replace_artifact(store, rollouts, staged, pruned=PRUNED)
    with pytest.raises(InputError) as caught:
        refuse_lost_scores(store, rollouts, folder)
    assert caught.value.place == f"run/{TABLE}"
    for word in ("(it was cut short)", FOLDER, PRUNED["by"], f"{store.path(TABLE)}.manifest.json"):
        assert word in caught.value.hint


def test_scores_never_made_or_moved_with_their_run_are_not_lost(store: ArtifactStore) -> None:
    rollouts = commit(store)
    store.write_file("iteration_000001/rewards/psnr/scores.parquet", b"x")
    store.move_to_previous(["iteration_000001"], reason="the configuration changed")
    rollouts = commit(store)
    replace_artifact(store, rollouts, None, pruned=PRUNED)
    store.write_file("quarantine/0009-zzz/reason.json", b"[]")
    for folder in (TABLE, "iteration_000001/rewards/psnr", SHARD):
        refuse_lost_scores(store, rollouts, folder)
