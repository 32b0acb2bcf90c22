"""The server's database: SQLite on one machine, PostgreSQL as soon as there are workers."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from grpo_core.errors import InputError

VARIABLES = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
"""Where Prefect reads the address, the first before the second."""

OLDEST_POSTGRES = (14, 9)
"""The oldest release that runs Prefect's statements."""

FORM = "postgresql+asyncpg://USER:PASSWORD@HOST:5432/DATABASE"
_DRIVERS = {"postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg", "sqlite": "sqlite+aiosqlite"}
_HINTS: Mapping[str, str] = {
    "28P01": "User or password is wrong; percent-encode / : @ % in the address's password.",
    "28000": "The user may not log in from here: CREATE ROLE ... LOGIN, or change the server's pg_hba.conf.",
    "3D000": 'The database does not exist: as an administrator, CREATE DATABASE "..." OWNER ... .',
    "42501": "The user may not create tables there: as an administrator, ALTER DATABASE ... OWNER TO that user.",
}
"""Hints by SQLSTATE."""


def choose_database(given: str | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Put the address into the environment in the form that Prefect takes; without one Prefect uses SQLite.

    Args:
        given: as an argument, so without a password; None if it is in the environment.
        environment: read if no argument is given, and changed.

    Raises:
        InputError: not an address, another kind of database, or a password in an argument.
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
        raise InputError(place, "(not shown)", f"It is not the address of a database, such as {FORM}.") from error
    shown = url.render_as_string(hide_password=True)
    if given and url.password is not None:
        hint = f"Everyone on this machine can read arguments: put the address into {VARIABLES[1]} instead."
        raise InputError(place, shown, hint)
    driver = _DRIVERS.get(url.drivername.partition("+")[0])
    if driver is None:
        raise InputError(place, shown, f"Prefect keeps its records in SQLite or PostgreSQL: {FORM}.")
    query = dict(url.query)
    if "sslmode" in query:
        # libpq's name of the parameter, which asyncpg does not know.
        query["ssl"] = query.pop("sslmode")
    for variable in VARIABLES:
        environment.pop(variable, None)
    environment[VARIABLES[0]] = url.set(drivername=driver, query=query).render_as_string(hide_password=False)


async def prepare_database() -> str:
    """Connect to the database that Prefect's settings name, and bring its tables up to date.

    Returns:
        Its address, without the password.

    Raises:
        InputError: it cannot be reached, refuses the user, does not exist, is too old, or cannot be written to.
    """
    from alembic.util import CommandError
    from asyncpg import PostgresError
    from prefect.server.database import provide_database_interface
    from prefect.settings import get_current_settings
    from sqlalchemy import make_url
    from sqlalchemy.exc import SQLAlchemyError

    setting = get_current_settings().server.database.connection_url
    assert setting is not None
    url = make_url(setting.get_secret_value())
    shown = url.render_as_string(hide_password=True)
    try:
        if url.get_backend_name() == "sqlite":
            if url.database and not url.database.startswith(("file:", ":memory:")):
                Path(url.database).absolute().parent.mkdir(parents=True, exist_ok=True)
        else:
            await _require_release()
        await provide_database_interface().create_db()
    except CommandError as error:
        hint = f"Its tables are from another release of Prefect ({error}): use that release, or another database."
        raise InputError("database", shown, hint) from error
    except (SQLAlchemyError, PostgresError) as error:
        cause = getattr(error, "orig", None) or error
        # SQLAlchemy wraps asyncpg's error in one of its own.
        state = getattr(cause, "sqlstate", None)
        raise InputError("database", shown, f"It refused: {cause}. {_HINTS.get(state or '', '')}".strip()) from error
    except OSError as error:
        reason = str(error) or type(error).__name__
        hint = (
            f"It does not answer or cannot be written ({reason}). Start it, correct the address, or set PREFECT_HOME."
        )
        raise InputError("database", shown, hint) from error
    return shown


async def _require_release() -> None:
    from prefect.server.database import provide_database_interface
    from sqlalchemy import text

    engine = await provide_database_interface().engine()
    async with engine.connect() as connection:
        number = (await connection.execute(text("SELECT current_setting('server_version_num')::int"))).scalar_one()
    if divmod(number, 10000) < OLDEST_POSTGRES:
        oldest = ".".join(map(str, OLDEST_POSTGRES))
        hint = f"Prefect needs {oldest} or later: upgrade the server."
        raise InputError("database", "PostgreSQL {}.{}".format(*divmod(number, 10000)), hint)
