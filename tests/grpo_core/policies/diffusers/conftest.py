"""Tiny pipelines, saved once."""

from pathlib import Path

import pytest

from grpo_core.policies.diffusers.policy import DiffusersPolicy
from tests.grpo_core.policies.diffusers.tiny_pipelines import SavedFolder, SharedPolicy, load, save, settings


@pytest.fixture(scope="session")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> SavedFolder:
    """The folder of a tiny pipeline by its name; never changed."""
    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            folders[name] = save(name, tmp_path_factory.mktemp(name) / "pipeline")
        return folders[name]

    return find


@pytest.fixture(scope="session")
def shared_policy(saved_folder: SavedFolder) -> SharedPolicy:
    """The policy over a tiny pipeline by its name, with the settings of the tests; its weights are never changed."""
    policies: dict[str, DiffusersPolicy] = {}

    def find(name: str) -> DiffusersPolicy:
        if name not in policies:
            policies[name] = load(saved_folder(name), settings(name))
        policies[name].sample_with(settings(name))
        return policies[name]

    return find
