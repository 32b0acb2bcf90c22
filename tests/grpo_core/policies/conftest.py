"""Tiny pipelines, saved once."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.grpo_core.policies.diffusers.tiny_pipelines import (
    CLASSES,
    NEED_SOURCES,
    SavedFolder,
    SharedPolicy,
    loaded_once,
    reduced_sources,
    saved_once,
)


@pytest.fixture(scope="session")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> SavedFolder:
    """The folder of a tiny pipeline by its name."""
    return saved_once(tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(scope="session")
def shared_policy(saved_folder: SavedFolder) -> SharedPolicy:
    """The policy over a tiny pipeline by its name, with the settings of the tests."""
    return loaded_once(saved_folder)


@pytest.fixture
def small_sources() -> Iterator[None]:
    """Two classes scale their sources to a megapixel, whatever the size of the image."""
    with ExitStack() as stack:
        for name in NEED_SOURCES:
            stack.enter_context(reduced_sources(CLASSES[name]))
        yield
