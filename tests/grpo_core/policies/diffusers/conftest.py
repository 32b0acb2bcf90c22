"""Tiny pipelines, saved once."""

import pytest

from tests.grpo_core.policies.diffusers.tiny_pipelines import (
    MAKE,
    SavedFolder,
    SharedPolicy,
    loaded_once,
    saved_once,
    settings,
)


@pytest.fixture(scope="session")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> SavedFolder:
    """The folder of a tiny pipeline by its name."""
    return saved_once(tmp_path_factory.mktemp("pipelines"), MAKE)


@pytest.fixture(scope="session")
def shared_policy(saved_folder: SavedFolder) -> SharedPolicy:
    """The policy over a tiny pipeline by its name, with the settings of the tests."""
    return loaded_once(saved_folder, settings)
