"""Delete what a run can do without: images and states of rollouts, old calls, unfinished writes, and moved folders.

Rollouts without images keep their other values, row groups and digests, and every reference to them stays valid. So do
rollouts without the states of their denoising steps, which are files of their own; no policy can be trained on them.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.execution.call import CALLS
from tasks.runs.layout import STATES
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.reference import MANIFEST_ENDING, ArtifactRef, Manifest, StaleReferenceError
from tasks.storage.artifacts.run_folder import INCOMING, PREVIOUS, QUARANTINE, REASON_FILE
from tasks.storage.artifacts.store import RUN_FILE, ArtifactStore, lineage_of
from tasks.storage.artifacts.tombstones import AND, IMAGES_REMOVED, is_half_pruned, removed_by, replace_artifact
from tasks.storage.filesystem.files import is_local, locked_file
from tasks.storage.tables.parquet import DIGESTS, encoding_writer, write_row_group

IMAGE = "image"
CALLS_ARE_KEPT = timedelta(days=1)
"""Longer than any stage takes; a run that was stopped looks for the results of its calls when it continues."""


@dataclass(frozen=True)
class Prunable:
    """An artifact of a run that may be pruned.

    Attributes:
        folder: within the run.
        made: when its manifest was written.
        half_pruned: a process that pruned it was killed.
    """

    folder: str
    reference: ArtifactRef
    manifest: Manifest
    made: datetime
    half_pruned: bool

    @property
    def is_complete(self) -> bool:
        """Whether all of its files exist as its stage made them."""
        return self.manifest.pruned is None

    @property
    def removed(self) -> tuple[str, ...]:
        """What was deleted from it, or is being deleted, in the words of its tombstone."""
        return removed_by(self.manifest.pruned)

    def described(self, removed: str, by: str, on: datetime) -> Mapping[str, Any]:
        """Return its tombstone's entries once this is deleted too; an interrupted deletion keeps its own.

        Args:
            by: the command that deletes it.
        """
        if removed in self.removed:
            return self.manifest.pruned or {}
        return {"removed": AND.join([*self.removed, removed]), "by": by, "on": f"{on:%Y-%m-%d}"}


def find_prunable(store: ArtifactStore, folder: str) -> Prunable | None:
    """Return the artifact in a folder of the run; None if there is none that this program reads."""
    manifest = store.manifest_at(store.path(folder))
    if manifest is None:
        return None
    try:
        reference = manifest.reference(f"{store.run}/{folder}")
    except (ValueError, TypeError):
        return None
    made = _modified(store, store.path(f"{folder}{MANIFEST_ENDING}"))
    return Prunable(folder, reference, manifest, made, is_half_pruned(store, folder, manifest))


def _modified(store: ArtifactStore, path: str) -> datetime:
    written: datetime = store.filesystem.modified(path)
    return written if written.tzinfo is not None else written.replace(tzinfo=UTC)


def bytes_below(store: ArtifactStore, path: str) -> int:
    """Return the size of a file, or of all files in a folder, of the filesystem; 0 if there is none."""
    if not store.filesystem.exists(path):
        return 0
    return sum(int(each["size"] or 0) for each in store.filesystem.find(path, detail=True).values())


def image_bytes(store: ArtifactStore, rollouts: Prunable) -> int:
    """Return the stored size of the images; 0 for texts, and if they are deleted or damaged."""
    # pyarrow may end the process on a damaged footer.
    if store.find(rollouts.folder) is None:
        return 0
    total = 0
    for name in _tables(rollouts):
        with store.filesystem.open(store.path(f"{rollouts.folder}/{name}"), "rb") as stream:
            metadata = pq.read_metadata(stream)
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        columns = [group.column(index) for group in groups for index in range(group.num_columns)]
        total += sum(column.total_compressed_size for column in columns if _has_images(column))
    return total


def _has_images(column: pq.ColumnChunkMetaData) -> bool:
    if column.path_in_schema.split(".")[0] != IMAGE:
        return False
    # Nulls take a few bytes in each row group.
    return column.statistics is None or column.statistics.null_count < column.num_values


def states_bytes(store: ArtifactStore, rollouts: Prunable) -> int:
    """Return the stored size of the states of denoising steps; 0 where there are none."""
    places = [store.path(f"{rollouts.folder}/{name}") for name in {*rollouts.manifest.files} - {*_tables(rollouts)}]
    return sum(int(store.filesystem.size(place) or 0) for place in places if store.filesystem.exists(place))


def has_states(rollouts: Prunable) -> bool:
    """Return whether states of denoising steps are among the files of rollouts."""
    return len(_tables(rollouts)) < len(rollouts.manifest.files)


def _tables(rollouts: Prunable) -> list[str]:
    return [name for name in rollouts.manifest.files if not name.startswith(f"{STATES}/")]


def delete_part(store: ArtifactStore, rollouts: Prunable, part: str, pruned: Mapping[str, Any]) -> None:
    """Replace rollouts by the same rollouts without their images, or without the states of their denoising steps.

    Args:
        part: IMAGES_REMOVED or STATES_REMOVED.
        pruned: the tombstone's entries.

    Raises:
        StaleReferenceError: its files do not match the manifest.
        StorageError: a disk or a bucket refuses it.
    """
    # Reading a damaged artifact would quarantine it; the next start does that and makes it again.
    if store.find(rollouts.folder) is None:
        raise StaleReferenceError(f"{rollouts.reference.uri}: one of its files is changed or missing")
    of_images = part == IMAGES_REMOVED
    rewrite: Callable[[Path, Path], object] = strip_images if of_images else shutil.copyfile
    with tempfile.TemporaryDirectory(prefix="grpo-") as fetched, store.staging() as staged:
        needless = None if of_images else STATES
        folder = store.local_files(rollouts.reference, Path(fetched) / "rollouts", without=needless)
        for name in rollouts.manifest.files if of_images else _tables(rollouts):
            target = staged / name
            target.parent.mkdir(parents=True, exist_ok=True)
            rewrite(folder / name, target)
        replace_artifact(store, rollouts.reference, staged, pruned=pruned)


def strip_images(source: Path, target: Path) -> None:
    """Copy a file; a table with images is written again, one row group at a time, with every image null."""
    file = pq.ParquetFile(source) if source.suffix == ".parquet" else None
    if file is None or IMAGE not in file.schema_arrow.names:
        shutil.copyfile(source, target)
        return
    digests = (file.metadata.metadata or {}).get(DIGESTS.encode())
    # Sorted, so that the same table always gives the same bytes.
    schema = file.schema_arrow.with_metadata(dict(sorted((file.schema_arrow.metadata or {}).items())))
    others = [name for name in schema.names if name != IMAGE]
    with encoding_writer(target, schema) as writer:
        for index in range(file.num_row_groups):
            kept = file.read_row_group(index, columns=others)
            absent = pa.nulls(kept.num_rows, schema.field(IMAGE).type)
            columns = [absent if name == IMAGE else kept[name] for name in schema.names]
            write_row_group(writer, pa.table(columns, schema=schema))
        if digests is not None:
            writer.add_key_value_metadata({DIGESTS: digests.decode()})


@dataclass(frozen=True)
class MovedFolder:
    """A folder in `previous/` or `quarantine/`.

    Attributes:
        folder: within the run.
        since: when a file was last moved there.
        size: bytes.
        restorable: the run's current configuration made it, so the run may restore it.
    """

    folder: str
    since: datetime
    size: int
    restorable: bool


def moved_folders(store: ArtifactStore) -> list[MovedFolder]:
    """Return all folders in `previous/` and `quarantine/` of a run, in order."""
    current, reader = lineage_of(store), RunReader(store)
    found = []
    for folder in [f"{parent}/{name}" for parent in (PREVIOUS, QUARANTINE) for name in reader.names(parent)]:
        files: dict[str, dict[str, int]] = store.filesystem.find(store.path(folder), detail=True)
        if not files:
            continue
        restorable = current is not None and lineage_of(store, file=f"{folder}/{RUN_FILE}") == current
        # Moved files keep their own time; the reason is written when they are moved.
        reason = [path for path in files if path == store.path(f"{folder}/{REASON_FILE}")]
        since = max(_modified(store, path) for path in reason or files)
        found.append(MovedFolder(folder, since, sum(each["size"] for each in files.values()), restorable))
    return found


def delete_moved(store: ArtifactStore, folder: str) -> None:
    """Delete a folder of `previous/` or `quarantine/`; its reason goes last, so that a killed deletion is repeated."""
    place, reason = store.path(folder), store.path(f"{folder}/{REASON_FILE}")
    for path in store.filesystem.find(place):
        if path != reason:
            store.filesystem.rm_file(path)
    if store.filesystem.exists(place):
        store.filesystem.rm(place, recursive=True)


def old_calls(store: ArtifactStore, now: datetime) -> list[str]:
    """Return paths of calls and outcomes that no run waits for."""
    paths = store.filesystem.find(store.path(CALLS)) if store.filesystem.exists(store.path(CALLS)) else []
    return sorted(path for path in paths if now - _modified(store, path) > CALLS_ARE_KEPT)


def abandoned_writes(store: ArtifactStore) -> list[str]:
    """Return folders in which a killed process was writing; nothing is changed."""
    incoming, found = Path(store.path(INCOMING)), []
    folders = sorted(path for path in incoming.glob("*") if path.is_dir()) if is_local(store.filesystem) else []
    for folder in folders:
        # A folder without a lock is one that its process is about to lock.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            if (folder / "lock").exists():
                with locked_file(folder / "lock", wait=False):
                    found.append(str(folder))
    return found
