"""`grpo ui` as a person starts it, on a real PostgreSQL server: what it asks, what it says, how it ends."""

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.server.heartbeat_automation import NAME, heartbeat_automation
from flows.server.reachable import require_server, server_database
from flows.server.start import ServerRequest, serve
from grpo_core.errors import InputError
from tests.flows.server.grpo_ui import GrpoUi, grpo_ui, ui_refused
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
def test_a_flow_runs_on_it_and_its_records_are_in_postgres(postgres: PostgresServer) -> None:
    require_server()
    assert server_database() == "postgresql"

    @task
    def double(number: int) -> int:
        return 2 * number

    @flow(name="doubling")
    async def doubling() -> int:
        return double(21)

    assert asyncio.run(doubling()) == 42
    told = "SELECT flow.name, flow_run.state_type FROM flow_run JOIN flow ON flow.id = flow_run.flow_id"
    assert postgres.sql(told, "ui") == "doubling|COMPLETED"


def test_it_says_what_to_export_and_no_password(ui: GrpoUi) -> None:
    assert f"export PREFECT_API_URL={ui.api_url}" in ui.said
    assert "export PREFECT_API_AUTH_STRING=..." in ui.said
    assert "prefect:***@127.0.0.1" in ui.said
    assert ui.process is not None
    seen = ui.said + " ".join(psutil.Process(ui.process.pid).cmdline())
    assert PASSWORD not in seen
    assert SECRET.partition(":")[2] not in seen


def test_without_the_password_nothing_but_the_health_is_told(ui: GrpoUi) -> None:
    assert httpx.get(f"{ui.api_url}/health").json() is True
    assert httpx.get(f"{ui.api_url}/admin/settings").status_code == 401
    assert httpx.get(f"{ui.api_url}/admin/settings", auth=("admin", "guess")).status_code == 401
    assert httpx.post(f"{ui.api_url}/flow_runs/filter", json={}).status_code in (401, 403)


def test_pages_of_others_are_kept_out(ui: GrpoUi) -> None:
    user, _, password = SECRET.partition(":")
    change = httpx.post(f"{ui.api_url}/flows/", json={"name": "intruder"}, auth=(user, password))
    assert change.status_code == 403
    ours, others = (
        httpx.options(
            f"{ui.api_url}/flows/", headers={"Origin": origin, "Access-Control-Request-Method": "POST"}
        ).headers.get("Access-Control-Allow-Origin")
        for origin in (f"http://localhost:{ui.port}", "http://elsewhere.example")
    )
    assert (ours, others) == (f"http://localhost:{ui.port}", None)


def test_the_settings_are_ours_and_secrets_are_hidden(ui: GrpoUi) -> None:
    user, _, password = SECRET.partition(":")
    answer = httpx.get(f"{ui.api_url}/admin/settings", auth=(user, password))
    server = answer.json()["server"]
    assert server["services"]["task_run_recorder"]["batch_size"] == 100
    assert server["services"]["event_persister"]["batch_size"] == 200
    assert set(server["services"]["db_vacuum"]["enabled"]) == {"events", "flow_runs"}
    assert (server["analytics_enabled"], server["ui"]["v2_enabled"]) == (False, False)
    assert (server["api"]["host"], server["ui"]["api_url"]) == ("127.0.0.1", ui.api_url)
    assert PASSWORD not in answer.text
    assert password not in answer.text


@pytest.mark.usefixtures("client")
def test_the_automation_is_there() -> None:
    with get_client(sync_client=True) as client:
        (automation,) = client.read_automations_by_name(NAME)
    assert automation.enabled
    assert automation.description == heartbeat_automation().description


def test_the_page_is_the_one_that_calls_nobody(ui: GrpoUi) -> None:
    page = httpx.get(f"http://127.0.0.1:{ui.port}/", follow_redirects=True)
    assert page.status_code == 200
    assert not page.url.path.startswith("/v2")


def test_a_port_in_use_is_told_at_once(ui: GrpoUi) -> None:
    with pytest.raises(InputError, match="Address already in use") as refused:
        serve(ServerRequest(port=ui.port), print)
    assert refused.value.value == f"127.0.0.1:{ui.port}"


def test_it_ends_when_told_and_leaves_nothing(ui: GrpoUi) -> None:
    # The last test of the module.
    assert ui.end(signal.SIGTERM) == 0
    assert ui.group_is_gone()
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", ui.port)) != 0
    assert "Traceback" not in ui.said


@flow(name="grpo quick")
async def quick() -> int:
    return 1


@pytest.mark.slow
def test_sqlite_is_the_default_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    with grpo_ui(tmp_path / "home", {}) as ui:
        assert (tmp_path / "home" / "prefect.db").exists()
        assert "SQLite is for one machine without workers" in ui.said
        with temporary_settings({PREFECT_API_URL: ui.api_url}):
            assert server_database() == "sqlite"
            for _ in range(8):
                assert asyncio.run(quick()) == 1
        time.sleep(5)
        assert "database is locked" not in ui.said
        assert ui.end(signal.SIGINT) == 0
        assert ui.group_is_gone()


@pytest.mark.slow
def test_a_database_that_does_not_answer_is_told(tmp_path: Path) -> None:
    environment = {"PREFECT_API_DATABASE_CONNECTION_URL": "postgresql://grpo:hidden@127.0.0.1:1/prefect"}
    code, told = ui_refused(tmp_path / "home", environment)
    assert (code, told.count("error: database: got 'postgresql+asyncpg://grpo:***@127.0.0.1:1/prefect'")) == (2, 1)
    assert "hidden" not in told
