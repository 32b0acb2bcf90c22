"""The server's database: SQLite on one machine, PostgreSQL as soon as there are workers."""

import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path

from grpo_core.errors import InputError

VARIABLES = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
"""Where Prefect reads the address, the first before the second."""

OLDEST_POSTGRES = (14, 9)
"""What Prefect's statements need."""

FORM = "postgresql+asyncpg://USER:PASSWORD@HOST:5432/DATABASE"
_DRIVERS = {"postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}


def choose_database(given: str | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Settle the address in the environment, in the form that Prefect takes; without one Prefect uses SQLite.

    Args:
        given: as an argument, so without a password.
        environment: read where no argument is given, and changed.

    Raises:
        InputError: an address that is none, of another kind of database, or a password in an argument.
    """
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    name = next((name for name in VARIABLES if environment.get(name)), None)
    place, address = ("--database", given) if given else (name or "", environment.get(name or "", ""))
    if not address:
        return
    try:
        url = make_url(address)
    except (ArgumentError, ValueError) as error:
        raise InputError(place, "(not shown)", f"It is no address of a database; one is {FORM}.") from error
    if given and url.password is not None:
        hint = f"Everyone on this machine can read arguments: put the address into {VARIABLES[1]} instead."
        raise InputError(place, url.render_as_string(hide_password=True), hint)
    backend = url.drivername.partition("+")[0]
    if backend not in _DRIVERS:
        shown = url.render_as_string(hide_password=True)
        raise InputError(place, shown, f"Prefect keeps its records in SQLite or PostgreSQL: {FORM}.")
    query = dict(url.query)
    if "sslmode" in query:
        # libpq's name of it, which asyncpg does not know.
        query["ssl"] = query.pop("sslmode")
    settled = url.set(drivername=_DRIVERS[backend], query=query)
    for variable in VARIABLES:
        environment.pop(variable, None)
    environment[VARIABLES[0]] = settled.render_as_string(hide_password=False)


async def prepare_database() -> str:
    """Try the database that Prefect's settings name, and bring its tables up to date.

    Returns:
        What it is, for people; no password.

    Raises:
        InputError: it cannot be reached, refuses the user, does not exist, is too old, or may not be written.
    """
    from prefect.server.database import provide_database_interface
    from prefect.settings import get_current_settings
    from sqlalchemy import make_url

    setting = get_current_settings().server.database.connection_url
    assert setting is not None
    url = make_url(setting.get_secret_value())
    shown = url.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite":
        _require_folder(url.database, shown)
    else:
        await _require_postgres(shown, url.database or "")
    await _migrate(provide_database_interface().create_db, shown)
    return shown


def _require_folder(database: str | None, shown: str) -> None:
    if not database or database.startswith(("file:", ":memory:")):
        return
    path = Path(database)
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not os.access(nearest, os.W_OK):
        raise InputError("database", shown, f"{nearest} cannot be written; set PREFECT_HOME to a folder that can.")
    path.absolute().parent.mkdir(parents=True, exist_ok=True)


async def _require_postgres(shown: str, database: str) -> None:
    from asyncpg import PostgresError
    from prefect.server.database import provide_database_interface
    from sqlalchemy import text
    from sqlalchemy.exc import DBAPIError

    question = text(
        "SELECT current_setting('server_version_num')::int, current_setting('server_version'), "
        "has_schema_privilege('public', 'CREATE') AND has_database_privilege(current_database(), 'CREATE')"
    )
    engine = await provide_database_interface().engine()
    try:
        async with engine.connect() as connection:
            number, version, writable = (await connection.execute(question)).one()
    except (DBAPIError, PostgresError) as error:
        # What goes wrong while it connects, SQLAlchemy 2.0 passes on as asyncpg said it.
        raise _refusal(error, shown, database) from error
    except (OSError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        hint = f"PostgreSQL does not answer there ({reason}). Start it, or hint host and port."
        raise InputError("database", shown, hint) from error
    if divmod(number, 10000) < OLDEST_POSTGRES:
        oldest = ".".join(map(str, OLDEST_POSTGRES))
        raise InputError("database", f"PostgreSQL {version}", f"Prefect needs {oldest} or later: upgrade the server.")
    if not writable:
        hint = f"The user may not make tables there: as an administrator, ALTER DATABASE {database} OWNER TO that user."
        raise InputError("database", shown, hint)


def _refusal(error: Exception, shown: str, database: str) -> InputError:
    said = str(getattr(error, "orig", error))
    hints: Mapping[str, str] = {
        "28P01": "User or password is wrong. Set them in the address, with / : @ % of the password percent-encoded.",
        "28000": "The user may not log in from here: CREATE ROLE ... LOGIN, or hint the server's pg_hba.conf.",
        "3D000": f'It does not exist: as an administrator, CREATE DATABASE "{database}" OWNER USER.',
        "53300": "The server has no connection left: raise its max_connections, or end what holds them.",
        "57P03": "The server is just starting or ending: try again in a moment.",
    }
    code = getattr(getattr(error, "orig", error), "sqlstate", None)
    return InputError("database", shown, hints.get(code or "", f"PostgreSQL refused: {said}."))


async def _migrate(create: Callable[[], Awaitable[None]], shown: str) -> None:
    from alembic.util import CommandError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        await create()
    except CommandError as error:
        # A revision that this release does not know.
        hint = f"Its tables are of another release of Prefect ({error}): use that release, or another database."
        raise InputError("database", shown, hint) from error
    except SQLAlchemyError as error:
        hint = f"Its tables cannot be brought up to date: {getattr(error, 'orig', error)}."
        raise InputError("database", shown, hint) from error
