"""`grpo ui` as a person starts it, on a real PostgreSQL server: its settings, what it prints, how it ends."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.server.heartbeat_automation import NAME, heartbeat_automation
from flows.server.reachable import require_server, server_database
from tests.flows.server.grpo_ui import GrpoUi, grpo_ui
from tests.postgres_server import PASSWORD, PostgresServer

SECRET = "admin:opens-the-door"


@pytest.fixture(scope="module")
def ui(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpoUi]:
    """With everything that can be asked for, as the owner of the database and no more."""
    postgres.sql(f"CREATE ROLE prefect LOGIN PASSWORD '{PASSWORD}'")
    postgres.sql("CREATE DATABASE ui OWNER prefect")
    environment = {
        "PREFECT_API_DATABASE_CONNECTION_URL": postgres.url("ui", user="prefect"),
        "PREFECT_SERVER_API_AUTH_STRING": SECRET,
        # A client's settings here are not the server's.
        "PREFECT_API_URL": "http://127.0.0.1:1/api",
    }
    with grpo_ui(tmp_path_factory.mktemp("ui"), environment, "--auth", "--csrf") as running:
        yield running


@pytest.fixture
def client(ui: GrpoUi) -> Iterator[None]:
    """This process is a client of it."""
    with temporary_settings({PREFECT_API_URL: ui.api_url, PREFECT_API_AUTH_STRING: SECRET}):
        yield


@pytest.mark.usefixtures("client")
def test_its_records_are_in_postgres(postgres: PostgresServer) -> None:
    require_server()
    assert server_database() == "postgresql"
    with get_client(sync_client=True) as client:
        client.create_flow_from_name("doubling")
    assert postgres.sql("SELECT name FROM flow", "ui") == "doubling"


def test_it_says_what_to_export_and_no_password(ui: GrpoUi) -> None:
    assert f"export PREFECT_API_URL={ui.api_url}" in ui.said
    assert "export PREFECT_API_AUTH_STRING=..." in ui.said
    assert ui.process is not None
    seen = ui.said + " ".join(psutil.Process(ui.process.pid).cmdline())
    assert PASSWORD not in seen
    assert SECRET.partition(":")[2] not in seen


def test_the_settings_are_ours_and_secrets_are_hidden(ui: GrpoUi) -> None:
    user, _, password = SECRET.partition(":")
    answer = httpx.get(f"{ui.api_url}/admin/settings", auth=(user, password))
    server = answer.json()["server"]
    assert server["services"]["task_run_recorder"]["batch_size"] == 100
    assert server["services"]["event_persister"]["batch_size"] == 200
    assert set(server["services"]["db_vacuum"]["enabled"]) == {"events", "flow_runs"}
    assert (server["analytics_enabled"], server["ui"]["v2_enabled"]) == (False, False)
    assert server["api"]["csrf_protection_enabled"]
    assert server["ui"]["api_url"] == ui.api_url
    assert PASSWORD not in answer.text
    assert password not in answer.text


@pytest.mark.usefixtures("client")
def test_the_automation_is_there() -> None:
    with get_client(sync_client=True) as client:
        (automation,) = client.read_automations_by_name(NAME)
    assert automation.enabled
    assert automation.description == heartbeat_automation().description


def test_it_ends_when_told_and_leaves_nothing(ui: GrpoUi) -> None:
    # The last test of the module.
    assert ui.end(signal.SIGTERM) in (0, -signal.SIGTERM)
    assert ui.group_is_gone()
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", ui.port)) != 0
    assert "Traceback" not in ui.said


@pytest.mark.slow
def test_sqlite_is_the_default_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    with grpo_ui(tmp_path / "home", {}) as ui:
        assert (tmp_path / "home" / "prefect.db").exists()
        assert "SQLite is for one machine without workers" in ui.said
        with temporary_settings({PREFECT_API_URL: ui.api_url}):
            assert server_database() == "sqlite"
        assert ui.end(signal.SIGINT) in (0, -signal.SIGINT)
        assert ui.group_is_gone()
