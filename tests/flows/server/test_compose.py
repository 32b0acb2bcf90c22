"""compose.yaml, as far as it can be checked without docker."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import prefect
import pytest
import typer
import yaml
from prefect.settings import Settings
from prefect.settings.legacy import _get_settings_fields

from flows.command_line.main import application
from flows.server.access import decide_access
from flows.server.database import choose_database
from tests.flows.conftest import REPOSITORY

COMPOSE: dict[str, Any] = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())
SERVER, POSTGRES = COMPOSE["services"]["prefect"], COMPOSE["services"]["postgres"]


def interpolated(value: str, **variables: str) -> str:
    """As docker compose does it, for variables that must be set."""
    return re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: variables[found[1]], value)


def test_every_name_is_a_setting_of_prefects() -> None:
    names = {name for name in SERVER["environment"] if name.startswith("PREFECT_")}
    assert len(names) == 2
    assert names <= set(_get_settings_fields(Settings))


def test_passwords_come_from_elsewhere_and_must_be_there() -> None:
    text = (REPOSITORY / "compose.yaml").read_text()
    secrets = re.findall(r"\$\{(\w+)(:\?[^}]+)?\}", text)
    assert {name for name, _ in secrets} == {"POSTGRES_PASSWORD", "PREFECT_SERVER_API_AUTH_STRING"}
    assert all("put" in message for _, message in secrets)


def test_only_this_machine_is_let_in_and_the_database_is_not_shown_at_all() -> None:
    assert SERVER["ports"] == ["127.0.0.1:4200:4200"]
    assert "ports" not in POSTGRES


def test_both_services_say_when_they_are_well_and_the_records_outlive_them() -> None:
    assert {service["restart"] for service in (SERVER, POSTGRES)} == {"unless-stopped"}
    assert SERVER["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert all(service["healthcheck"]["test"][0] == "CMD" for service in (SERVER, POSTGRES))
    (volume,) = (entry.partition(":")[0] for entry in POSTGRES["volumes"])
    assert volume in COMPOSE["volumes"]


def test_the_health_check_is_a_program() -> None:
    _, program, option, code = SERVER["healthcheck"]["test"]
    assert (program, option) == ("python", "-c")
    compile(code, "healthcheck", "exec")


def test_the_image_is_of_the_release_that_is_used_here() -> None:
    assert SERVER["image"].startswith(f"prefecthq/prefect:{prefect.__version__}-python3.")


def test_the_command_is_one_of_ours_and_what_it_asks_for_is_granted() -> None:
    python, option, module, name, *arguments = SERVER["command"]
    assert (python, option, module) == ("python", "-m", "flows.command_line.main")
    command = typer.main.get_command(application).get_command(None, name)  # type: ignore[attr-defined, arg-type]
    parsed = command.make_context(name, list(arguments)).params
    secret = interpolated(SERVER["environment"]["PREFECT_SERVER_API_AUTH_STRING"], PREFECT_SERVER_API_AUTH_STRING="u:p")
    environment = {"PREFECT_SERVER_API_AUTH_STRING": secret}
    access = decide_access(parsed["host"], parsed["port"], parsed["url"], auth=parsed["auth"], environment=environment)
    assert (access.api_url, access.auth, access.csrf) == ("http://127.0.0.1:4200/api", "u:p", True)


def test_the_server_finds_the_database() -> None:
    given = interpolated(SERVER["environment"]["PREFECT_SERVER_DATABASE_CONNECTION_URL"], POSTGRES_PASSWORD="s3cret")
    environment = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": given}
    choose_database(None, environment)
    name, user = POSTGRES["environment"]["POSTGRES_DB"], POSTGRES["environment"]["POSTGRES_USER"]
    settled = environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    assert settled == f"postgresql+asyncpg://{user}:s3cret@postgres:5432/{name}"


@pytest.mark.slow
def test_the_image_holds_everything_that_the_server_imports() -> None:
    """Prefect and what it needs, and of this project the folders that are mounted."""
    program = """
import json, sys
import flows.command_line.main, flows.server.heartbeat_automation, flows.server.start
import prefect.client.orchestration, prefect.server.api.server
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    loaded = set(json.loads(ended.stdout.splitlines()[-1]))
    mounted = {Path(volume.partition(":")[0]).name for volume in SERVER["volumes"]}
    assert loaded & {"flows", "tasks", "configs", "data", "grpo_core"} == mounted
    assert all(volume.endswith(":ro") for volume in SERVER["volumes"])
    assert not loaded & {"torch", "numpy", "transformers", "pyarrow", "polars", "tenacity", "s3fs", "PIL"}
