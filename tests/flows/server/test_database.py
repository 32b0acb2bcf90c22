"""The server's database: addresses mended or refused, and a real PostgreSQL server tried."""

import asyncio

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


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("mysql://u:secret@h/d", r"SQLite or PostgreSQL: postgresql\+asyncpg://USER"),
        ("secret", r"no address of a database; one is postgresql\+asyncpg://USER"),
        ("postgresql://u:secret@h:port/d", "no address of a database"),
    ],
)
def test_other_addresses_are_refused_and_their_passwords_not_shown(given: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint) as refused:
        choose_database(None, {VARIABLES[1]: given})
    assert refused.value.place == VARIABLES[1]
    assert "secret" not in str(refused.value)


def test_a_password_in_an_argument_is_refused() -> None:
    with pytest.raises(InputError, match=f"--database: .*read arguments.*{VARIABLES[1]}") as refused:
        choose_database("postgresql://u:secret@h/d", {})
    assert "secret" not in str(refused.value)


def test_tables_are_made_and_the_password_is_not_told(postgres: PostgresServer) -> None:
    told = prepare(postgres.url("prefect"))
    assert told == f"postgresql+asyncpg://grpo:***@127.0.0.1:{postgres.port}/prefect"
    assert postgres.sql("SELECT count(*) FROM flow_run", "prefect") == "0"


def test_tables_of_a_later_prefect_are_left_alone(postgres: PostgresServer) -> None:
    postgres.sql("CREATE DATABASE later")
    postgres.sql(
        "CREATE TABLE alembic_version (version_num text); INSERT INTO alembic_version VALUES ('ffff')", "later"
    )
    with pytest.raises(InputError, match="of another release of Prefect"):
        prepare(postgres.url("later"))
    assert postgres.sql("SELECT version_num FROM alembic_version", "later") == "ffff"


@pytest.mark.parametrize(
    ("name", "user", "password", "hint"),
    [
        ("prefect", "grpo", "wr0ng", "User or password is wrong"),
        ("prefect", "nobody", "wr0ng", "User or password is wrong"),
        ("absent", "grpo", PASSWORD, 'does not exist: as an administrator, CREATE DATABASE "absent"'),
        ("prefect", "guest", "guest", "may not make tables there: .*ALTER DATABASE prefect OWNER"),
    ],
)
def test_what_postgres_refuses_is_told_with_a_mend(
    postgres: PostgresServer, name: str, user: str, password: str, hint: str
) -> None:
    with pytest.raises(InputError, match=hint) as refused:
        prepare(postgres.url(name, user=user, password=password))
    assert f"{user}:***@127.0.0.1" in str(refused.value)
    assert password not in str(refused.value).replace(user, "")


def test_a_server_that_does_not_answer_is_told(postgres: PostgresServer) -> None:
    address = postgres.url("prefect").replace(str(postgres.port), "1")
    with pytest.raises(InputError, match=r"PostgreSQL does not answer there .*hint host and port"):
        prepare(address)
    with pytest.raises(InputError, match=r"PostgreSQL does not answer there .*Name or service"):
        prepare(address.replace("127.0.0.1", "nowhere.invalid"))


def test_encryption_that_the_server_lacks_is_told(postgres: PostgresServer) -> None:
    with pytest.raises(InputError, match=r"PostgreSQL does not answer there .*SSL"):
        prepare(f"{postgres.url('prefect')}?sslmode=require")


def test_an_old_postgres_is_refused(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    release = postgres.sql("SHOW server_version").split()[0]
    monkeypatch.setattr(database, "OLDEST_POSTGRES", (99, 1))
    with pytest.raises(InputError, match=rf"PostgreSQL {release}.* Prefect needs 99\.1 or later"):
        prepare(postgres.url("prefect"))
