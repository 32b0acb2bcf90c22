"""Copy the advantages of another run's samples into this run."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.execution.caching import stage_task
from tasks.runs.layout import ADVANTAGES
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import current_store

STAGE = "copy advantages"


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    # The folder is in the key: another replay may keep the same table for another iteration.
    return {"advantages": inputs["advantages"].digest, "folder": inputs["folder"]}


@stage_task(STAGE, _describe)
def copy_advantages_task(advantages: ArtifactRef, folder: str) -> ArtifactRef:
    """Copy the verified table with its metrics; the copy counts as taking no time."""
    store = current_store()
    with tempfile.TemporaryDirectory() as fetched, store.staging() as staged:
        source = store.local_files(advantages, Path(fetched) / "advantages")
        for path in sorted(source.glob("*.parquet")):
            shutil.copyfile(path, staged / path.name)
        return store.commit(
            staged,
            f"{folder}/{ADVANTAGES}",
            digest=advantages.digest,
            schema_version=advantages.schema_version,
            rows=advantages.rows,
            seconds=0.0,
            metrics=advantages.metrics,
        )
