"""compose.yaml, as far as it can be checked without docker."""

import re
from typing import Any

import prefect
import typer
import yaml

from flows.command_line.main import application
from flows.server.access import decide_access
from flows.server.database import VARIABLES, choose_database
from tests.flows.conftest import REPOSITORY

TEXT = (REPOSITORY / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVER, POSTGRES = COMPOSE["services"]["prefect"], COMPOSE["services"]["postgres"]


def test_only_this_machine_is_let_in_and_passwords_come_from_elsewhere() -> None:
    assert SERVER["ports"] == ["127.0.0.1:4200:4200"]
    assert "ports" not in POSTGRES
    secrets = re.findall(r"\$\{(\w+)(:\?[^}]+)?\}", TEXT)
    assert {name for name, _ in secrets} == {"POSTGRES_PASSWORD", "PREFECT_SERVER_API_AUTH_STRING"}
    assert all(required for _, required in secrets)


def test_the_command_and_the_database_are_accepted() -> None:
    assert SERVER["image"].startswith(f"prefecthq/prefect:{prefect.__version__}-python3.")
    environment = {
        name: re.sub(r"\$\{\w+:\?[^}]*\}", "u:p" if "AUTH" in name else "s3cret", value)
        for name, value in SERVER["environment"].items()
    }
    *_, module, name = SERVER["command"][:4]
    assert module == "flows.command_line.main"
    command = typer.main.get_command(application).get_command(None, name)  # type: ignore[attr-defined, arg-type]
    parsed = command.make_context(name, SERVER["command"][4:]).params
    access = decide_access(parsed["host"], parsed["port"], parsed["url"], auth=parsed["auth"], environment=environment)
    assert (access.api_url, access.auth, access.csrf) == ("http://127.0.0.1:4200/api", "u:p", True)
    choose_database(None, environment)
    database = POSTGRES["environment"]
    user, place = database["POSTGRES_USER"], f"postgres:5432/{database['POSTGRES_DB']}"
    assert environment[VARIABLES[0]] == f"postgresql+asyncpg://{user}:s3cret@{place}"
