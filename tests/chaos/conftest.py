"""Prefect servers that outlive the kills, the process that forks what is killed, and the table of all kills."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.flows.server.grpo_ui import grpo_ui
from tests.postgres_server import postgres_server

from .campaign import Fall
from .processes import ForkServer, forking
from .table import table_of

TABLE = "CHAOS_TABLE"
"""Variable with the file that the table goes to; without it the table is only printed."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What processes of one machine run under."""
    home = tmp_path_factory.mktemp("home")
    with grpo_ui(home, {}) as server:
        yield {"PREFECT_API_URL": server.api_url, "PREFECT_HOME": str(home), "TMPDIR": str(home)}


@pytest.fixture(scope="module")
def shared_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What processes of many machines run under: their server keeps its records in PostgreSQL."""
    home = tmp_path_factory.mktemp("shared-home")
    with postgres_server() as postgres:
        postgres.sql("CREATE DATABASE prefect")
        with grpo_ui(home, {"PREFECT_API_DATABASE_CONNECTION_URL": postgres.url("prefect")}) as server:
            yield {"PREFECT_API_URL": server.api_url, "PREFECT_HOME": str(home), "TMPDIR": str(home)}


@pytest.fixture(scope="module")
def fork_server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with forking(environment, tmp_path_factory.mktemp("fork-server") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def shared_fork_server(
    shared_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForkServer]:
    with forking(shared_environment, tmp_path_factory.mktemp("fork-server") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def noted(request: pytest.FixtureRequest) -> Iterator[Callable[[list[Fall]], None]]:
    """Takes the kills of a test; the table of all of them is shown and written once the tests are over."""
    falls: list[Fall] = []
    yield falls.extend
    told = table_of(falls)
    if os.environ.get(TABLE):
        Path(os.environ[TABLE]).write_text(told)
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\n{told}")
