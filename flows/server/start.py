"""`grpo ui`: Prefect's server in this process, until a signal ends it."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.prefect_settings import CLIENT, LASTING_SERVER
from flows.server.access import AUTH_VARIABLES, Access, decide_access
from flows.server.database import VARIABLES, choose_database, prepare_database
from grpo_core.errors import InputError

if TYPE_CHECKING:
    import uvicorn

_GRACE_SECONDS = 10


@dataclass(frozen=True)
class ServerRequest:
    """The options of `grpo ui`.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 for any free one.
        url: where others find the server; None for http://HOST:PORT.
        auth: whether requests need a user and a password.
        csrf: whether pages in a browser need the server's token.
        database: address without a password; None for the environment's, and SQLite if it has none.
    """

    host: str = "127.0.0.1"
    port: int = 4200
    url: str | None = None
    auth: bool = False
    csrf: bool = False
    database: str | None = None


def serve(request: ServerRequest, report_progress: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        request: the options.
        report_progress: called with each line for people; shows PREFECT_API_URL once requests are accepted.

    Raises:
        InputError: the address would leave the server open or is in use, or the database cannot be used.
        RuntimeError: the server did not start; its log has the reason.
    """
    # Before the imports, which take seconds.
    decide_access(request.host, request.port, request.url, auth=request.auth, csrf=request.csrf)
    with _listening(request.host, request.port) as listener:
        port = int(listener.getsockname()[1])
        access = decide_access(request.host, port, request.url, auth=request.auth, csrf=request.csrf)
        choose_database(request.database)
        report_progress("starting Prefect's server ...")
        _settle(access)
        database = asyncio.run(_prepare())
        if database.startswith("sqlite"):
            _filter_sqlite_logs()
        with _database_named(database):
            _serve(access, listener, lambda: _report_addresses(access, database, report_progress))


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        hint = f"{error}. Choose another with --port, or end what listens there; a server may be running already."
        raise InputError("--host and --port", f"{host}:{port}", hint) from error


def _settle(access: Access) -> None:
    """Set the environment, which Prefect reads when it is imported."""
    for name, value in LASTING_SERVER.items():
        os.environ.setdefault(name, value)
    # Other commands report failures themselves, so their console shows no logs.
    if os.environ.get("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL") == CLIENT["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"]:
        os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "NOTSET"
    os.environ.update(access.settings())
    # The server would show a client's address to browsers as its own.
    os.environ.pop("PREFECT_API_URL", None)


async def _prepare() -> str:
    from flows.server.heartbeat_automation import extend_deadline

    database = await prepare_database()
    await extend_deadline()
    return database


def _database_named(database: str) -> AbstractContextManager[object]:
    """Put the kind of database into the settings that clients may read; the address is hidden there."""
    from prefect.settings import PREFECT_SERVER_DATABASE_DRIVER, temporary_settings

    return temporary_settings({PREFECT_SERVER_DATABASE_DRIVER: database.partition("://")[0]})


def _filter_sqlite_logs() -> None:
    """Drop log lines that only SQLite causes: an event that found the database locked is retried.

    If the retries fail, the automation misses the end of a run, and does not change a run that has ended.
    """
    consumer = logging.getLogger("prefect.server.utilities.messaging.memory")
    consumer.addFilter(lambda record: not (record.exc_info and "database is locked" in str(record.exc_info[1])))
    actions = logging.getLogger("prefect.server.events.actions")
    actions.addFilter(lambda record: "Run is already in terminal state" not in record.getMessage())


def _serve(access: Access, listener: socket.socket, report_progress: Callable[[], None]) -> None:
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    settings = get_current_settings().server
    config = uvicorn.Config(
        create_app(final=True),
        log_level=settings.logging_level.lower(),
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal that ended it once more, for the previous handlers.
    signals = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        asyncio.run(_serving(server, access, listener, report_progress))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if not server.started:
        raise RuntimeError("the server did not start; the lines above say why")


async def _serving(
    server: "uvicorn.Server", access: Access, listener: socket.socket, report_progress: Callable[[], None]
) -> None:
    from prefect.client.orchestration import PrefectClient

    from flows.server.heartbeat_automation import ensure_automations

    ended = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not ended.done():
        await asyncio.sleep(0.05)
    if server.started and not server.should_exit:
        try:
            async with PrefectClient(access.own_api_url, auth_string=access.auth) as client:
                await ensure_automations(client)
            report_progress()
        except BaseException:
            server.should_exit = True
            await ended
            raise
    await ended


def _report_addresses(access: Access, database: str, report_progress: Callable[[str], None]) -> None:
    report_progress(f"Prefect's server and UI: {access.url} (records in {database}); Ctrl-C stops it")
    report_progress("For runs and workers, in their environment:")
    report_progress(f"    export PREFECT_API_URL={access.api_url}")
    if access.auth:
        report_progress(f"    export {AUTH_VARIABLES[1]}=...   # the user and password that the server was given")
    if database.startswith("sqlite"):
        report_progress(
            f"SQLite is for one machine without workers; with workers set {VARIABLES[1]} (docs/operations.md)"
        )
