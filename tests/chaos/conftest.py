"""Prefect servers that outlive the kills, the process that forks what is killed, and the table of all kills."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.campaign import Fall
from tests.chaos.processes import ForkServer, forking
from tests.chaos.table import table_of
from tests.flows.server.grpo_ui import grpo_ui
from tests.postgres_server import postgres_server

TABLE = "CHAOS_TABLE"
"""Variable with the file that the table goes to; without it the table is only printed."""
FALLS = pytest.StashKey[list[list[Fall]]]()


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


@pytest.fixture
def noted(request: pytest.FixtureRequest) -> Callable[[list[Fall]], None]:
    """Takes the list to which a test will append its kills, for the table; so the kills of one that fails are in it."""
    return request.config.stash.setdefault(FALLS, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show and write the table of all kills."""
    falls = [fall for of_one_test in config.stash.get(FALLS, []) for fall in of_one_test]
    if not falls:
        return
    told = table_of(falls)
    terminalreporter.write_line(f"\n{told}")
    if os.environ.get(TABLE):
        Path(os.environ[TABLE]).write_text(told)
