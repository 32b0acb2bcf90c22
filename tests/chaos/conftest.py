"""Prefect servers that outlive the kills, and the processes that fork what is killed."""

from collections.abc import Iterator

import pytest

from tests.chaos.processes import ForkServer, forking
from tests.servers import grpo_ui, postgres_server


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables for the processes of one machine."""
    home = tmp_path_factory.mktemp("home")
    with grpo_ui(home, {}) as server:
        yield {"PREFECT_API_URL": server.api_url, "PREFECT_HOME": str(home), "TMPDIR": str(home)}


@pytest.fixture(scope="module")
def fork_server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with forking(environment, tmp_path_factory.mktemp("fork-server") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def shared_fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Forks the processes of many machines: their server keeps its records in PostgreSQL."""
    home = tmp_path_factory.mktemp("shared-home")
    with postgres_server() as postgres:
        postgres.sql("CREATE DATABASE prefect")
        with grpo_ui(home, {"PREFECT_API_DATABASE_CONNECTION_URL": postgres.url("prefect")}) as ui:
            environment = {"PREFECT_API_URL": ui.api_url, "PREFECT_HOME": str(home), "TMPDIR": str(home)}
            with forking(environment, tmp_path_factory.mktemp("fork-server") / "log") as server:
                yield server
