"""The server's database: its address, and what a real PostgreSQL server refuses."""

import asyncio
from pathlib import Path

import pytest

from flows.server import database
from flows.server.database import VARIABLES, choose_database, prepare_database
from grpo_core.errors import InputError
from tests.flows.server.conftest import server_of
from tests.postgres_server import PASSWORD, PostgresServer


def prepare(url: str) -> str:
    environment = {VARIABLES[0]: url}
    choose_database(None, environment)
    with server_of(environment[VARIABLES[0]]):
        return asyncio.run(prepare_database())


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ("postgresql://u:p@h/d", "postgresql+asyncpg://u:p@h/d"),
        ("postgres://u:p@h:5433/d", "postgresql+asyncpg://u:p@h:5433/d"),
        ("postgresql+psycopg2://u:p%2F%40@h/d", "postgresql+asyncpg://u:p%2F%40@h/d"),
        ("postgresql+asyncpg://u:p@h/d", "postgresql+asyncpg://u:p@h/d"),
        ("postgresql://u:p@h/d?sslmode=require", "postgresql+asyncpg://u:p@h/d?ssl=require"),
        ("sqlite:////var/lib/prefect.db", "sqlite+aiosqlite:////var/lib/prefect.db"),
    ],
)
@pytest.mark.parametrize("variable", VARIABLES)
def test_an_address_is_put_into_the_form_that_prefect_takes(variable: str, given: str, settled: str) -> None:
    environment = {variable: given}
    choose_database(None, environment)
    assert environment == {"PREFECT_SERVER_DATABASE_CONNECTION_URL": settled}


def test_prefects_first_variable_wins_and_an_argument_before_both() -> None:
    environment = dict(zip(VARIABLES, ("sqlite:///first.db", "sqlite:///second.db"), strict=True))
    choose_database(None, environment)
    assert environment == {VARIABLES[0]: "sqlite+aiosqlite:///first.db"}
    choose_database("postgresql://u@h/d", environment)
    assert environment == {VARIABLES[0]: "postgresql+asyncpg://u@h/d"}


@pytest.mark.parametrize("given", ["mysql://u:secret@h/d", "secret", "postgresql://u:secret@h:port/d"])
def test_other_addresses_are_refused_and_their_passwords_not_shown(given: str) -> None:
    with pytest.raises(InputError) as refused:
        choose_database(None, {VARIABLES[1]: given})
    assert refused.value.place == VARIABLES[1]
    assert "secret" not in str(refused.value)


def test_a_password_in_an_argument_is_refused() -> None:
    with pytest.raises(InputError) as refused:
        choose_database("postgresql://u:secret@h/d", {})
    assert refused.value.place == "--database"
    assert "secret" not in str(refused.value)


def test_tables_are_created_and_the_password_is_not_shown(postgres: PostgresServer) -> None:
    assert prepare(postgres.url("prefect")) == f"postgresql+asyncpg://grpo:***@127.0.0.1:{postgres.port}/prefect"
    assert postgres.sql("SELECT count(*) FROM flow_run", "prefect") == "0"


def test_tables_of_a_later_prefect_are_left_alone(postgres: PostgresServer) -> None:
    postgres.sql("CREATE DATABASE later")
    postgres.sql(
        "CREATE TABLE alembic_version (version_num text); INSERT INTO alembic_version VALUES ('ffff')", "later"
    )
    with pytest.raises(InputError, match="another release"):
        prepare(postgres.url("later"))
    assert postgres.sql("SELECT version_num FROM alembic_version", "later") == "ffff"


@pytest.mark.parametrize(
    ("name", "user", "password", "state"),
    [
        ("prefect", "grpo", "wr0ng", "28P01"),
        ("absent", "grpo", PASSWORD, "3D000"),
        ("owned", "guest", "guest", "42501"),
    ],
)
def test_a_refusal_of_postgres_has_its_hint(
    postgres: PostgresServer, name: str, user: str, password: str, state: str
) -> None:
    if name == "owned":
        postgres.sql("CREATE DATABASE owned")
    with pytest.raises(InputError) as refused:
        prepare(postgres.url(name, user=user, password=password))
    assert refused.value.hint.endswith(database._HINTS[state])
    assert f"{user}:***@127.0.0.1" in str(refused.value)
    assert password not in str(refused.value).replace(user, "")


def test_a_server_that_does_not_answer_is_reported(postgres: PostgresServer) -> None:
    address = postgres.url("prefect").replace(str(postgres.port), "1")
    for given in (
        address,
        address.replace("127.0.0.1", "nowhere.invalid"),
        f"{postgres.url('prefect')}?sslmode=require",
    ):
        with pytest.raises(InputError, match="does not answer"):
            prepare(given)


def test_an_old_postgres_is_refused(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    release = postgres.sql("SHOW server_version").split()[0]
    monkeypatch.setattr(database, "OLDEST_POSTGRES", (99, 1))
    with pytest.raises(InputError) as refused:
        prepare(postgres.url("prefect"))
    assert str(refused.value.value) == f"PostgreSQL {release}"
    assert "99.1" in refused.value.hint


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="PREFECT_HOME"):
        prepare(f"sqlite:///{tmp_path}/file/prefect.db")
