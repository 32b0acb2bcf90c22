"""Who may reach the server: nothing that would leave it open is started, and compose.yaml starts such a one."""

import re
from collections.abc import Mapping
from typing import Any

import prefect
import pytest
import typer
import yaml

from flows.command_line.main import application
from flows.server.database import VARIABLES, choose_database
from flows.server.start import Access, ServerRequest, decide_access
from grpo_core.errors import InputError
from tests.flows.conftest import REPOSITORY

SECRET = {"PREFECT_SERVER_API_AUTH_STRING": "admin:s3cret"}
TEXT = (REPOSITORY / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVER, POSTGRES = COMPOSE["services"]["prefect"], COMPOSE["services"]["postgres"]


def test_by_default_this_machine_alone_and_its_own_pages() -> None:
    access = decide_access(ServerRequest(port=4321), {})
    assert (access.api_url, access.auth, access.csrf) == ("http://127.0.0.1:4321/api", None, False)
    settings = access.settings()
    assert settings["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"] == "http://127.0.0.1:4321,http://localhost:4321"
    assert "PREFECT_SERVER_API_AUTH_STRING" not in settings


@pytest.mark.parametrize("variable", ["PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"])
def test_with_authentication_others_are_let_in_and_their_pages_need_a_token(variable: str) -> None:
    access = decide_access(ServerRequest(host="192.168.1.7", auth=True), {variable: "admin:pass:word"})
    assert (access.auth, access.csrf) == ("admin:pass:word", True)
    settings = access.settings()
    assert settings["PREFECT_SERVER_API_AUTH_STRING"] == "admin:pass:word"
    assert settings["PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED"] == "true"
    assert settings["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"] == "http://192.168.1.7:4200"


def test_behind_a_proxy_its_address_is_told_and_ours_is_used_here() -> None:
    access = decide_access(ServerRequest(host="0.0.0.0", url="https://prefect.lab:8443/", auth=True), SECRET)
    assert access.api_url == "https://prefect.lab:8443/api"
    assert access.own_api_url == "http://127.0.0.1:4200/api"
    assert access.settings()["PREFECT_SERVER_UI_API_URL"] == "https://prefect.lab:8443/api"
    assert "https://prefect.lab:8443" in access.settings()["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"].split(",")
    assert Access("::", 4200, "https://prefect.lab", "u:p", True).own_api_url == "http://[::1]:4200/api"


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
        decide_access(ServerRequest(**request_), environment)
    assert (refused.value.place, refused.value.value) == (place, value)


def test_composed_only_this_machine_is_let_in_and_passwords_come_from_elsewhere() -> None:
    assert SERVER["ports"] == ["127.0.0.1:4200:4200"]
    assert "ports" not in POSTGRES
    secrets = re.findall(r"\$\{(\w+)(:\?[^}]+)?\}", TEXT)
    assert {name for name, _ in secrets} == {"POSTGRES_PASSWORD", "PREFECT_SERVER_API_AUTH_STRING"}
    assert all(required for _, required in secrets)


def test_the_composed_command_and_database_are_accepted() -> None:
    assert SERVER["image"].startswith(f"prefecthq/prefect:{prefect.__version__}-python3.")
    environment = {
        name: re.sub(r"\$\{\w+:\?[^}]*\}", "u:p" if "AUTH" in name else "s3cret", value)
        for name, value in SERVER["environment"].items()
    }
    *_, module, name = SERVER["command"][:4]
    assert module == "flows.command_line.main"
    command = typer.main.get_command(application).get_command(None, name)  # type: ignore[attr-defined, arg-type]
    parsed = command.make_context(name, SERVER["command"][4:]).params
    access = decide_access(ServerRequest(**parsed), environment)
    assert (access.api_url, access.auth, access.csrf) == ("http://127.0.0.1:4200/api", "u:p", True)
    choose_database(None, environment)
    database = POSTGRES["environment"]
    user, place = database["POSTGRES_USER"], f"postgres:5432/{database['POSTGRES_DB']}"
    assert environment[VARIABLES[0]] == f"postgresql+asyncpg://{user}:s3cret@{place}"
