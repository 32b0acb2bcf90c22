"""Pruning: images and states deleted from rollouts, and writes that nothing waits for."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from configs.scoring import RewardSection
from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward
from tasks.pruning import Prunable, abandoned_writes, delete_part, find_prunable, part_bytes
from tasks.rewards.score_rows import batches_for, score_rows
from tasks.runs.layout import IMAGES_FILE, PART_FILE, STATES_FILE
from tasks.storage.artifacts.commit import IMAGES_REMOVED, STATES_REMOVED, commit_artifact
from tasks.storage.artifacts.restore import restore_artifact
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.parquet import TableWriter
from tasks.storage.schemas import IMAGE_ROLLOUTS, IMAGES, SCHEMA_VERSION
from tests.tasks.reports.made_runs import contents
from tests.tasks.storage.made_artifacts import writer_elsewhere

GROUPS, SIBLINGS = 3, 2
FOLDER = "iteration_000001/rollouts"
DAY = datetime(2026, 1, 1, tzinfo=UTC)


def write_rollouts(folder: Path) -> str:
    """Groups of rows, and images that cannot be packed; the digest."""
    writers = [
        TableWriter(folder / name.format(0), schema)
        for name, schema in ((PART_FILE, IMAGE_ROLLOUTS), (IMAGES_FILE, IMAGES))
    ]
    for group in range(GROUPS):
        names = [f"{group}-{sibling}" for sibling in range(SIBLINGS)]
        known = {
            "sample_id": names,
            "group_id": [str(group)] * SIBLINGS,
            "dataset": ["default"] * SIBLINGS,
            "prompt": [f"prompt {group}"] * SIBLINGS,
            "columns": ["{}"] * SIBLINGS,
            "token_ids": [[1, 2, group]] * SIBLINGS,
            "image": [{"bytes": os.urandom(20_000), "path": f"{name}.png"} for name in names],
        }
        for writer in writers:
            writer.write({field.name: known.get(field.name, pa.nulls(SIBLINGS, field.type)) for field in writer.schema})
    return " ".join(writer.close() for writer in writers)


class TestParts:
    @pytest.mark.parametrize("part", [IMAGES_REMOVED, STATES_REMOVED])
    def test_its_files_alone_are_deleted(self, store: ArtifactStore, tmp_path: Path, part: str) -> None:
        valid = commit(store, with_states=True)
        before = {path: store.filesystem.cat_file(path) for path in store.filesystem.find(store.path(FOLDER))}
        (name,) = valid.names(part)
        size = part_bytes(store, valid, part)
        assert size == len(before.pop(store.path(f"{FOLDER}/{name}"))) > 40_000
        delete_part(store, valid, part, "grpo prune", DAY)
        after = {path: store.filesystem.cat_file(path) for path in store.filesystem.find(store.path(FOLDER))}
        assert after == before
        pruned = find(store)
        assert (pruned.is_complete, pruned.half_pruned, part_bytes(store, pruned, part)) == (False, False, 0)
        assert pruned.removed == (part,)
        assert pruned.reference == valid.reference == restore_artifact(store, valid.reference)
        assert not (store.local_files(valid.reference, tmp_path / "fetched") / name).exists()

    @pytest.mark.parametrize("order", [("images", "states"), ("states", "images")])
    def test_both_one_after_the_other(self, store: ArtifactStore, order: tuple[str, str]) -> None:
        first = commit(store, with_states=True).reference
        for day, removed in enumerate(order):
            delete_part(store, find(store), removed, f"grpo prune --{removed}", DAY + timedelta(days=day))
        found = find(store)
        assert (found.removed, list(found.manifest.files), found.half_pruned) == (order, ["part-00000.parquet"], False)
        assert found.manifest.pruned == {
            "lineage": None,
            "removed": " and ".join(order),
            "by": f"grpo prune --{order[1]}",
            "on": "2026-01-02",
        }
        assert store.pruned_reason(first) == found.manifest.pruned

    def test_no_reward_scores_what_has_no_image(self, tmp_path: Path) -> None:
        write_rollouts(tmp_path)
        (tmp_path / IMAGES_FILE.format(0)).unlink()
        section, reward = RewardSection(reward="jpeg"), build_reward("jpeg", {})
        store = ArtifactStore(str(tmp_path), "run")
        (batch,) = batches_for(reward, section, tmp_path, frozenset({"0-0"}), store, store.run)
        with pytest.raises(InputError) as caught:
            score_rows(reward, section, batch)
        assert caught.value.place == "sample 0-0"


def commit(store: ArtifactStore, *, with_states: bool = False) -> Prunable:
    """Rollouts with a table of images, and perhaps a file of latents."""
    with store.staging() as staged:
        digest = write_rollouts(staged)
        if with_states:
            states = staged / STATES_FILE.format(0, 0)
            states.parent.mkdir()
            states.write_bytes(os.urandom(50_000))
        commit_artifact(
            store, staged, FOLDER, digest=digest, schema_version=SCHEMA_VERSION, rows=6, seconds=1.0, metrics={}
        )
    assert find(store).is_complete
    return find(store)


def find(store: ArtifactStore) -> Prunable:
    found = find_prunable(store, FOLDER)
    assert found is not None
    return found


class TestLeftovers:
    def test_writes_of_processes_that_are_gone(self, tmp_path: Path) -> None:
        store = ArtifactStore(str(tmp_path), "run")
        with writer_elsewhere(store) as (writer, _), writer_elsewhere(store):
            assert abandoned_writes(store) == []
            writer.kill()
            writer.wait()
            before = contents(tmp_path)
            (gone,) = abandoned_writes(store)
            assert contents(tmp_path) == before
            store.clear_abandoned()
            assert not Path(gone).exists()
            assert abandoned_writes(store) == []
