"""`grpo ui` as a person starts it, on a real PostgreSQL server: its settings, what it prints, how it ends."""

import asyncio
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx
import prefect
import psutil
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import Automation
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.server.heartbeat_automation import FLOWS, NAME, ensure_automation, heartbeat_automation
from flows.server.prefect_settings import LASTING_SERVER, SERVER
from flows.server.reachable import require_server, server_database
from flows.server.start import ServerRequest, serve, server_settings
from grpo_core.errors import InputError
from tasks.execution.stage import STAGES
from tests.flows.conftest import REPOSITORY
from tests.servers import PASSWORD, GrpoUi, PostgresServer, grpo_ui

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


AUTH = {"PREFECT_SERVER_API_AUTH_STRING": "admin:s3cret"}
TEXT = (REPOSITORY / "compose.yaml").read_text()


def test_by_default_this_machine_alone_and_its_own_pages() -> None:
    assert server_settings(ServerRequest(port=4321), {}) == {
        "PREFECT_SERVER_UI_API_URL": "http://127.0.0.1:4321/api",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": "http://127.0.0.1:4321,http://localhost:4321",
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "false",
        "PREFECT_SERVER_DATABASE_DRIVER": "sqlite+aiosqlite",
    }


@pytest.mark.parametrize("variable", ["PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"])
def test_with_authentication_others_are_let_in_and_their_pages_need_a_token(variable: str) -> None:
    environment = {variable: "admin:pass:word", "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql+asyncpg://u:p@h/d"}
    assert server_settings(ServerRequest(host="192.168.1.7", auth=True), environment) == {
        "PREFECT_SERVER_UI_API_URL": "http://192.168.1.7:4200/api",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": "http://192.168.1.7:4200",
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_API_AUTH_STRING": "admin:pass:word",
        "PREFECT_SERVER_DATABASE_DRIVER": "postgresql+asyncpg",
    }


def test_behind_a_proxy_its_address_is_the_one_that_others_use() -> None:
    request = ServerRequest(host="0.0.0.0", url="https://prefect.lab:8443/", auth=True)
    settings = server_settings(request, AUTH)
    assert settings["PREFECT_SERVER_UI_API_URL"] == "https://prefect.lab:8443/api"
    assert "https://prefect.lab:8443" in settings["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"].split(",")


@pytest.mark.parametrize(
    ("request_", "environment", "place", "value"),
    [
        *(({"host": host}, {}, "--host", host) for host in ("0.0.0.0", "::", "192.168.1.7", "gpu-box")),
        ({"host": "0.0.0.0", "auth": True}, AUTH, "--host", "0.0.0.0"),
        *(({"url": url}, {}, "--url", url) for url in ("prefect.lab", "ftp://lab", "http://lab/api", "http://")),
        ({"url": "https://me:hidden@prefect.lab"}, {}, "--url", "https://...@prefect.lab"),
        ({"auth": True}, {}, "--auth", "no user and password in the environment"),
        ({"auth": True}, dict.fromkeys(AUTH, ""), "--auth", "no user and password in the environment"),
        *(({}, dict.fromkeys(AUTH, each), *AUTH, "(not shown)") for each in ("only", ":s", "admin:", "ädmin:s")),
    ],
)
def test_what_would_leave_it_open_or_cannot_be_used_is_refused(
    request_: Mapping[str, Any], environment: Mapping[str, str], place: str, value: str
) -> None:
    with pytest.raises(InputError) as refused:
        server_settings(ServerRequest(**request_), environment)
    assert (refused.value.place, refused.value.value) == (place, value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_somebody_listens_on_is_refused_before_anything_is_announced(host: str) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError) as refused:
            serve(ServerRequest(host=host, port=port), said.append)
    assert (refused.value.place, refused.value.value) == ("--port", port)
    assert f":{port}/api" in refused.value.hint
    assert not any("PREFECT_API_URL" in line for line in said)


def test_the_composed_server_is_that_of_grpo_ui() -> None:
    services: dict[str, Any] = yaml.safe_load(TEXT)["services"]
    server, postgres = services["prefect"], services["postgres"]
    assert server["image"].startswith(f"prefecthq/prefect:{prefect.__version__}-python3.")
    assert (server["ports"], "ports" in postgres) == (["127.0.0.1:4200:4200"], False)
    # Passwords come from elsewhere.
    secrets = re.findall(r"\$\{(\w+)(:\?[^}]+)?\}", TEXT)
    assert {name for name, required in secrets if required} == {"POSTGRES_PASSWORD", "PREFECT_SERVER_API_AUTH_STRING"}
    assert all(required for _, required in secrets)
    environment = {
        name: re.sub(r"\$\{\w+:\?[^}]*\}", "u:p" if "AUTH" in name else "s3cret", value)
        for name, value in server["environment"].items()
    }
    address = environment.pop("PREFECT_SERVER_DATABASE_CONNECTION_URL")
    assert address == f"postgresql+asyncpg://prefect:s3cret@postgres:5432/{postgres['environment']['POSTGRES_DB']}"
    request = ServerRequest(host="0.0.0.0", url="http://127.0.0.1:4200", auth=True)
    given = {"PREFECT_SERVER_API_AUTH_STRING": "u:p", "PREFECT_SERVER_DATABASE_CONNECTION_URL": address}
    assert environment == {**SERVER, **LASTING_SERVER, **server_settings(request, given)}
    host, port = server["command"][-3::2]
    assert server["command"][:3] == ["prefect", "server", "start"]
    assert (host, port) == ("0.0.0.0", "4200")


def test_it_is_about_every_flow_of_ours_and_no_other() -> None:
    sources = [path.read_text() for path in (REPOSITORY / "flows").rglob("*.py")]
    named = {*STAGES, *(name for source in sources for name in re.findall(r'@flow\(\s*name="([^"]+)"', source))}
    # Made by hand, on no server.
    named -= {"tiny model", "tiny text model", "tiny sd3"}
    assert {"grpo train", "grpo replay", "collect rollouts"} <= named
    assert [name for name in named if not any(fnmatchcase(name, pattern) for pattern in FLOWS)] == []
    assert not any(fnmatchcase("nightly report", pattern) for pattern in FLOWS)


async def registered() -> list[Automation]:
    async with get_client() as client:
        return await client.read_automations_by_name(NAME)


@pytest.mark.usefixtures("server")
def test_it_is_registered_once_and_stays_as_a_person_left_it() -> None:
    async def go() -> None:
        async with get_client() as client:
            # Deployments of other tests of this server register it as well.
            for each in await registered():
                await client.delete_automation(each.id)
            assert await ensure_automation(client)
            (first,) = await registered()
            changed = {"description": "another", "enabled": False}
            await client.update_automation(first.id, heartbeat_automation().model_copy(update=changed))
            assert await ensure_automation(client)
            (kept,) = await registered()
            assert (kept.id, kept.description, kept.enabled) == (first.id, "another", False)

    asyncio.run(go())
