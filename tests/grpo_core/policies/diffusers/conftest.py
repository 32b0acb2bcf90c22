"""Tiny pipelines, saved once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grpo_core.policies.diffusers.tiny_pipelines import save

SavedFolder = Callable[[str], Path]


@pytest.fixture(scope="session")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> SavedFolder:
    """The folder of a tiny pipeline by its name; never changed."""
    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            folders[name] = save(name, tmp_path_factory.mktemp(name) / "pipeline")
        return folders[name]

    return find
