"""Artifacts for tests of the store, and what is left of them."""

import json
from pathlib import Path

import pytest

from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import SET_ASIDE, ArtifactStore

FOLDER = "iteration_000001/rollouts"
FILES = {"part-00000.parquet": b"first part", "nested/part-00001.bin": bytes(range(256))}
REPOSITORY = Path(__file__).resolve().parents[3]


def commit(store: ArtifactStore, folder: str = FOLDER, *, seconds: float = 1.0, rows: int = 4) -> ArtifactRef:
    with store.staging() as staged:
        for name, content in FILES.items():
            (staged / name).parent.mkdir(exist_ok=True)
            (staged / name).write_bytes(content)
        return store.commit(
            staged, folder, digest="d" * 64, schema_version=1, rows=rows, seconds=seconds, metrics={"reward": 0.5}
        )


def reasons(store: ArtifactStore) -> list[str]:
    notes = sorted(Path(store.path(SET_ASIDE)).glob("*/reason.json"))
    return [json.loads(note.read_text())["reason"] for note in notes]


def kept(store: ArtifactStore) -> dict[str, bytes]:
    top = Path(store.path())
    return {path.relative_to(top).as_posix(): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path), "run")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
