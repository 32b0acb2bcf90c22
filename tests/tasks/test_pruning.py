"""Pruning: images deleted from a table, and old calls and writes that nothing waits for."""

import itertools
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import datasets
import fsspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.scoring import RewardSection
from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward
from tasks.pruning import (
    Prunable,
    abandoned_writes,
    delete_moved,
    delete_part,
    find_prunable,
    has_states,
    image_bytes,
    moved_folders,
    states_bytes,
    strip_images,
)
from tasks.rewards.rows import batches_of, score_rows
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.artifacts.tombstones import IMAGES_REMOVED, STATES_REMOVED
from tasks.storage.filesystem.files import dump_checked
from tasks.storage.tables import parquet
from tasks.storage.tables.parquet import TableWriter, part_digests, write_table
from tasks.storage.tables.schemas import IMAGE_ROLLOUTS, SCHEMA_VERSION, STATES, TEXT_ROLLOUTS
from tests.tasks.reports.made_runs import contents
from tests.tasks.storage.made_artifacts import writer_elsewhere

GROUPS, SIBLINGS = 3, 2
FOLDER = "iteration_000001/rollouts"
PRUNED = {"removed": "images", "by": "grpo prune", "on": "2026-01-01"}


def write_rollouts(path: Path, schema: pa.Schema = IMAGE_ROLLOUTS) -> str:
    """Groups of rows whose images cannot be packed; the digest."""
    writer = TableWriter(path, schema)
    for group in range(GROUPS):
        names = [f"{group}-{sibling}" for sibling in range(SIBLINGS)]
        known = {
            "sample_id": names,
            "group_id": [str(group)] * SIBLINGS,
            "dataset": ["default"] * SIBLINGS,
            "prompt": [f"prompt {group}"] * SIBLINGS,
            "columns": ["{}"] * SIBLINGS,
            "token_ids": [[1, 2, group]] * SIBLINGS,
            "completion": ["text"] * SIBLINGS,
            "image": [{"bytes": os.urandom(20_000), "path": f"{name}.png"} for name in names],
        }
        writer.write({field.name: known.get(field.name, pa.nulls(SIBLINGS, field.type)) for field in schema})
    return writer.close()


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ArtifactStore]:
    yield ArtifactStore(str(tmp_path / "runs") if request.param == "local" else "memory://pruning", "run")
    memory = fsspec.filesystem("memory")
    if memory.exists("/pruning"):
        memory.rm("/pruning", recursive=True)


class TestImages:
    def test_everything_else_stays_as_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
        before, after = tmp_path / "before.parquet", tmp_path / "after.parquet"
        write_rollouts(before)
        strip_images(before, after)
        assert pq.read_schema(after).equals(pq.read_schema(before), check_metadata=True)
        assert part_digests(after) == part_digests(before)
        assert pq.read_metadata(after).num_row_groups == GROUPS
        previous, current = pl.read_parquet(before), pl.read_parquet(after)
        assert current.drop("image").equals(previous.drop("image"))
        assert current["image"].null_count() == current.height == GROUPS * SIBLINGS
        assert before.stat().st_size > GROUPS * SIBLINGS * 20_000 > 10_000 > after.stat().st_size - 20_000
        rows = datasets.Dataset.from_parquet(str(after), cache_dir=str(tmp_path / "cache"))
        assert isinstance(rows.features["image"], datasets.Image)
        assert rows[0]["image"] is None

    def test_once_more_gives_the_same_bytes(self, tmp_path: Path) -> None:
        paths = [tmp_path / f"{number}.parquet" for number in range(3)]
        write_rollouts(paths[0])
        for source, target in itertools.pairwise(paths):
            strip_images(source, target)
        assert paths[1].read_bytes() == paths[2].read_bytes()

    def test_texts_are_copied(self, tmp_path: Path) -> None:
        before, after = tmp_path / "before.parquet", tmp_path / "after.parquet"
        write_rollouts(before, TEXT_ROLLOUTS)
        strip_images(before, after)
        assert after.read_bytes() == before.read_bytes()

    def test_the_freed_bytes_are_known_before(self, store: ArtifactStore) -> None:
        valid = commit(store)
        expected, size = image_bytes(store, valid), total(store)
        assert expected > GROUPS * SIBLINGS * 20_000
        delete_part(store, valid, IMAGES_REMOVED, PRUNED)
        assert size - total(store) == pytest.approx(expected, rel=0.02)
        pruned = find(store)
        assert (pruned.is_complete, pruned.half_pruned, image_bytes(store, pruned)) == (False, False, 0)
        assert pruned.reference.digest == valid.reference.digest
        assert store.restore_artifact(valid.reference) == valid.reference

    def test_no_reward_scores_what_has_no_image(self, tmp_path: Path) -> None:
        write_rollouts(tmp_path / "rollouts.parquet")
        (tmp_path / "without").mkdir()
        strip_images(tmp_path / "rollouts.parquet", tmp_path / "without" / "rollouts.parquet")
        section = RewardSection(reward="jpeg")
        (batch,) = batches_of(tmp_path / "without", 32, frozenset({"0-0"}), with_tokens=False)
        with pytest.raises(InputError, match="sample 0-0"):
            score_rows(build_reward("jpeg", {}), section, batch)


def commit(store: ArtifactStore, *, with_states: bool = False) -> Prunable:
    """Rollouts with a table of images, and perhaps a file of latents."""
    with store.staging() as staged:
        digest = write_rollouts(staged / "part-00000.parquet")
        if with_states:
            states: dict[str, list[object]] = {
                "sample_id": ["0-0"],
                "states": [[os.urandom(50_000)]],
                "dtype": ["float16"],
                "shape": [[25_000]],
            }
            write_table(staged / "states" / "part-00000.parquet", STATES, states)
        store.commit(staged, FOLDER, digest=digest, schema_version=SCHEMA_VERSION, rows=6, seconds=1.0, metrics={})
    assert find(store).is_complete
    return find(store)


def find(store: ArtifactStore) -> Prunable:
    found = find_prunable(store, FOLDER)
    assert found is not None
    return found


def total(store: ArtifactStore) -> int:
    return sum(store.filesystem.size(path) for path in store.filesystem.find(store.path(FOLDER)))


class TestMovedFolders:
    def test_age_size_and_whether_the_run_may_take_it_back(self, store: ArtifactStore) -> None:
        store.write_file("run.json", dump_checked({"lineage": "a"}))
        store.write_file("policies/x", b"12345")
        store.move_to_previous(["run.json", "policies"], reason="the configuration changed")
        store.write_file("run.json", dump_checked({"lineage": "b"}))
        store.write_file("damaged", b"1")
        store.quarantine(["damaged"], reason="it is damaged")
        first, second = moved_folders(store)
        assert (first.restorable, second.restorable) == (False, False)
        assert first.size > second.size > 1
        assert datetime.now(UTC) - first.since < timedelta(minutes=5)
        store.write_file("run.json", dump_checked({"lineage": "a"}))
        assert [each.restorable for each in moved_folders(store)] == [True, False]
        delete_moved(store, second.folder)
        assert moved_folders(store) == [moved_folders(store)[0]]
        assert not store.filesystem.exists(store.path(second.folder))

    def test_an_ended_removal_is_gone_on_with(self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("x", "y"):
            store.write_file(f"policies/{name}", b"1")
        store.move_to_previous(["policies"], reason="the configuration changed")
        (whole,) = moved_folders(store)
        real, removed = type(store.filesystem).rm_file, []

        def ended(self, path):  # type: ignore[no-untyped-def]
            if removed:
                raise KeyboardInterrupt
            removed.append(path)
            real(self, path)

        with monkeypatch.context() as patch:
            patch.setattr(type(store.filesystem), "rm_file", ended)
            with pytest.raises(KeyboardInterrupt):
                delete_moved(store, whole.folder)
        (left,) = moved_folders(store)
        assert (left.folder, left.since) == (whole.folder, whole.since)
        delete_moved(store, left.folder)
        assert moved_folders(store) == []


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


class TestStates:
    def test_the_table_stays_as_it_was(self, store: ArtifactStore, tmp_path: Path) -> None:
        before = commit(store, with_states=True)
        table = store.filesystem.cat_file(store.path(f"{FOLDER}/part-00000.parquet"))
        size = store.filesystem.size(store.path(f"{FOLDER}/states/part-00000.parquet"))
        assert size > 50_000
        assert (has_states(before), states_bytes(store, before)) == (True, size)
        pruned = before.described("states", "grpo prune", datetime(2026, 1, 1, tzinfo=UTC))
        delete_part(store, before, STATES_REMOVED, pruned)
        after = find(store)
        assert (has_states(after), states_bytes(store, after), after.removed) == (False, 0, ("states",))
        assert store.filesystem.cat_file(store.path(f"{FOLDER}/part-00000.parquet")) == table
        assert store.restore_artifact(before.reference) == before.reference
        assert [path.name for path in store.local_files(before.reference, tmp_path / "fetched").iterdir()] != []

    @pytest.mark.parametrize("order", [("images", "states"), ("states", "images")])
    def test_both_one_after_the_other(self, store: ArtifactStore, order: tuple[str, str]) -> None:
        first = commit(store, with_states=True).reference
        for day, removed in enumerate(order, start=1):
            current = find(store)
            pruned = current.described(removed, f"grpo prune --{removed}", datetime(2026, 1, day, tzinfo=UTC))
            delete_part(store, current, removed, pruned)
        found = find(store)
        assert found.removed == order
        assert found.manifest.pruned == {
            "removed": " and ".join(order),
            "by": f"grpo prune --{order[1]}",
            "on": "2026-01-02",
        }
        assert (image_bytes(store, found), states_bytes(store, found), found.half_pruned) == (0, 0, False)
        assert store.pruned_reason(first) == found.manifest.pruned

    def test_a_deletion_that_was_cut_short_is_finished(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = commit(store, with_states=True)
        pruned = before.described("states", "grpo prune", datetime(2026, 1, 1, tzinfo=UTC))
        remove = type(store.filesystem).rm_file

        def interrupted(filesystem: Any, path: str) -> None:
            if "states" in path:
                raise KeyboardInterrupt
            remove(filesystem, path)

        with monkeypatch.context() as patched:
            patched.setattr(type(store.filesystem), "rm_file", interrupted)
            with pytest.raises(KeyboardInterrupt):
                delete_part(store, before, STATES_REMOVED, pruned)
        half = find(store)
        assert (half.half_pruned, half.removed) == (True, ("states",))
        assert half.described("states", "another", datetime(2027, 1, 1, tzinfo=UTC)) == pruned
        delete_part(store, half, STATES_REMOVED, pruned)
        done = find(store)
        assert not done.half_pruned
        assert not store.filesystem.exists(store.path(f"{FOLDER}/states/part-00000.parquet"))
