"""Who may reach the server: nothing that would leave it open is started, and compose.yaml starts such a one."""

import re
from collections.abc import Mapping
from typing import Any

import prefect
import pytest
import yaml

from flows.prefect_settings import LASTING_SERVER, SERVER
from flows.server.start import ServerRequest, server_settings
from grpo_core.errors import InputError
from tests.flows.conftest import REPOSITORY

SECRET = {"PREFECT_SERVER_API_AUTH_STRING": "admin:s3cret"}
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
    settings = server_settings(request, SECRET)
    assert settings["PREFECT_SERVER_UI_API_URL"] == "https://prefect.lab:8443/api"
    assert "https://prefect.lab:8443" in settings["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"].split(",")


@pytest.mark.parametrize(
    ("request_", "environment", "place", "value"),
    [
        *(({"host": host}, {}, "--host", host) for host in ("0.0.0.0", "::", "192.168.1.7", "gpu-box")),
        ({"host": "0.0.0.0", "auth": True}, SECRET, "--host", "0.0.0.0"),
        *(({"url": url}, {}, "--url", url) for url in ("prefect.lab", "ftp://lab", "http://lab/api", "http://")),
        ({"url": "https://me:hidden@prefect.lab"}, {}, "--url", "https://...@prefect.lab"),
        ({"auth": True}, {}, "--auth", "no user and password in the environment"),
        ({"auth": True}, dict.fromkeys(SECRET, ""), "--auth", "no user and password in the environment"),
        *(({}, dict.fromkeys(SECRET, each), *SECRET, "(not shown)") for each in ("only", ":s", "admin:", "ädmin:s")),
    ],
)
def test_what_would_leave_it_open_or_cannot_be_used_is_refused(
    request_: Mapping[str, Any], environment: Mapping[str, str], place: str, value: str
) -> None:
    with pytest.raises(InputError) as refused:
        server_settings(ServerRequest(**request_), environment)
    assert (refused.value.place, refused.value.value) == (place, value)


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
