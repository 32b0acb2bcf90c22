"""Rollouts without their images: every other value, the row groups and the digests stay as they were."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.pruning.prunable import Prunable
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.parquet import DIGESTS

IMAGE = "image"


def image_bytes(store: ArtifactStore, rollouts: Prunable) -> int:
    """What the images take as they are stored; 0 for texts, and where they are gone or damaged."""
    # The reader of a changed footer may end the whole process.
    if store.find(rollouts.folder) is None:
        return 0
    total = 0
    for name in rollouts.files:
        with store.filesystem.open(store.path(f"{rollouts.folder}/{name}"), "rb") as stream:
            total += _image_bytes(pq.read_metadata(stream))
    return total


def _image_bytes(metadata: pq.FileMetaData) -> int:
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    held = [column for column in columns if column.path_in_schema.split(".")[0] == IMAGE]
    # Nulls take a few bytes a row group, which are none of an image's.
    return sum(
        column.total_compressed_size
        for column in held
        if column.statistics is None or column.statistics.null_count < column.num_values
    )


def remove_images(store: ArtifactStore, rollouts: Prunable, pruned: Mapping[str, Any]) -> None:
    """Put the same rollouts without images in the place of an artifact.

    Raises:
        StaleReferenceError: its files are not what the manifest says.
        StorageError: a disk or a bucket does not take it.
    """
    # Whoever reads a damaged artifact moves it; that is for the start that makes it again.
    if store.find(rollouts.folder) is None:
        raise StaleReferenceError(f"{rollouts.reference.uri}: a file of it is changed or missing")
    with tempfile.TemporaryDirectory(prefix="grpo-") as fetched, store.staging() as staged:
        folder = store.local_files(rollouts.reference, Path(fetched) / "rollouts")
        for name in rollouts.manifest.files:
            target = staged / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".parquet"):
                strip_images(folder / name, target)
            else:
                shutil.copyfile(folder / name, target)
        store.replace_artifact(rollouts.reference, staged, pruned=pruned)


def strip_images(source: Path, target: Path) -> None:
    """Write a table once more with every image null; a row group at a time, and no image is read."""
    file = pq.ParquetFile(source)
    digests = (file.metadata.metadata or {}).get(DIGESTS.encode())
    # In an order of its own, so that the same table always gives the same bytes.
    schema = file.schema_arrow.with_metadata(dict(sorted((file.schema_arrow.metadata or {}).items())))
    if IMAGE not in schema.names:
        shutil.copyfile(source, target)
        return
    others = [name for name in schema.names if name != IMAGE]
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for index in range(file.num_row_groups):
            kept = file.read_row_group(index, columns=others)
            absent = pa.nulls(kept.num_rows, schema.field(IMAGE).type)
            columns = [absent if name == IMAGE else kept[name] for name in schema.names]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=max(1, kept.num_rows))
        if digests is not None:
            writer.add_key_value_metadata({DIGESTS: digests.decode()})
