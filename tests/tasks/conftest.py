"""Fixtures of the tests of tasks."""

from pathlib import Path

import pytest

from tasks.storage.artifacts.store import ArtifactStore, use_store
from tests.tasks.stage_calls import Write


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """The store of an empty run on a local disk, which the stages of the test use."""
    store = ArtifactStore(str(tmp_path / "runs"), "run")
    use_store(store)
    return store


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of this name and content, byte for byte, and gives its path."""

    def write_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_file
