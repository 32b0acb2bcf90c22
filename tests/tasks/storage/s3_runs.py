"""Runs in a bucket of the S3 server."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.storage.artifacts.store import SET_ASIDE, ArtifactStore
from tests.tasks.storage.made_artifacts import FOLDER

PART_0 = f"{FOLDER}/part-00000.parquet"


@pytest.fixture
def store(bucket: str) -> ArtifactStore:
    return ArtifactStore(f"{bucket}/runs", "run")


def reasons(store: ArtifactStore) -> list[str]:
    notes = sorted(store.filesystem.glob(store.path(f"{SET_ASIDE}/*/reason.json")))
    return [json.loads(store.filesystem.cat_file(note))["reason"] for note in notes]


def read(store: ArtifactStore, folder: Path, reference: Any) -> dict[str, bytes]:
    local = store.local_files(reference, folder)
    return {path.relative_to(local).as_posix(): path.read_bytes() for path in local.rglob("*") if path.is_file()}
