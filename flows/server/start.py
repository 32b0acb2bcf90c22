"""`grpo ui`: Prefect's server in this process until a signal ends it, and who may reach it."""

import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import Field
from typer import Option

from configs.validation import Section
from flows.prefect_settings import CLIENT, LASTING_SERVER
from flows.server.database import VARIABLES, choose_database, prepare_database
from grpo_core.errors import InputError

if TYPE_CHECKING:
    import uvicorn

AUTH_VARIABLES = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING")
"""Variables with the server's user and password; clients read the second."""

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_EVERYWHERE = ("0.0.0.0", "::")
_GRACE_SECONDS = 10


class ServerRequest(Section):
    """Starts Prefect's server."""

    port: int = Field(4200, description="port of the page and the API; 0 for a free one")
    host: str = Field("127.0.0.1", description="address to listen on; --auth is required beyond this machine")
    url: str | None = Field(None, description="address that others use, such as a TLS proxy's https://...")
    auth: Annotated[bool, Option("--auth")] = Field(
        False, description="require the USER:PASSWORD in PREFECT_SERVER_API_AUTH_STRING"
    )
    csrf: Annotated[bool, Option("--csrf")] = Field(
        False, description="protect against cross-site requests in the browser"
    )
    database: Annotated[str | None, Option(metavar="URL")] = Field(
        None, description="database URL without a password; or set PREFECT_API_DATABASE_CONNECTION_URL"
    )


@dataclass(frozen=True)
class Access:
    """How the server can be reached.

    Attributes:
        url: where browsers, runs and workers find it, without a path; behind a proxy, the proxy's.
        auth: `user:password` that every request must carry; None for no authentication.
        csrf: whether a page in a browser needs the server's token to change anything.
    """

    host: str
    port: int
    url: str
    auth: str | None
    csrf: bool

    @property
    def api_url(self) -> str:
        """Value of PREFECT_API_URL for clients."""
        return f"{self.url}/api"

    @property
    def own_api_url(self) -> str:
        """Value of PREFECT_API_URL on this machine, without a proxy."""
        return f"{_address({'0.0.0.0': '127.0.0.1', '::': '::1'}.get(self.host, self.host), self.port)}/api"

    def settings(self) -> Mapping[str, str]:
        """Return Prefect's settings, as environment variables."""
        origins = {self.url, _address(self.host, self.port)}
        if self.host in _LOOPBACK:
            origins |= {_address("127.0.0.1", self.port), _address("localhost", self.port)}
        settings = {
            "PREFECT_SERVER_API_HOST": self.host,
            "PREFECT_SERVER_API_PORT": str(self.port),
            "PREFECT_SERVER_UI_API_URL": self.api_url,
            "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(sorted(origins)),
            "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": str(self.csrf).lower(),
        }
        return settings | ({AUTH_VARIABLES[0]: self.auth} if self.auth else {})


def decide_access(request: ServerRequest, environment: Mapping[str, str] = os.environ) -> Access:
    """Check the options, and refuse those that would leave the server open.

    Args:
        request: requests need a user and a password also if the environment sets them for the server; pages need the
            server's token also if the host is not loopback.
        environment: has the user and the password, which are never shown.

    Raises:
        InputError: other machines can reach the address without authentication; user and password are missing or
            malformed; or the URL cannot be used.
    """
    host, here = request.host, request.host in _LOOPBACK
    auth = request.auth or bool(environment.get(AUTH_VARIABLES[0]))
    if not here and not auth:
        hint = (
            "Other machines can reach this address, and could do anything on the server. Add "
            f"--auth with {AUTH_VARIABLES[0]}=USER:PASSWORD in the environment, and put a TLS proxy in front, since "
            "every request carries the password; or listen on 127.0.0.1 behind a proxy or a tunnel."
        )
        raise InputError("--host", host, hint)
    if request.url is None and host in _EVERYWHERE:
        hint = "Add --url with the address under which browsers, runs and workers find it, such as https://prefect.lab."
        raise InputError("--host", host, hint)
    url = _own_url(request.url) if request.url else _address(host, request.port)
    return Access(host, request.port, url, _secret(environment) if auth else None, request.csrf or not here)


def _secret(environment: Mapping[str, str]) -> str:
    name = next((name for name in AUTH_VARIABLES if environment.get(name)), None)
    if name is None:
        hint = f"Put USER:PASSWORD into {AUTH_VARIABLES[0]}; everyone on this machine can read arguments."
        raise InputError("--auth", "no user and password in the environment", hint)
    user, _, password = environment[name].partition(":")
    if not user or not password or not environment[name].isascii():
        # The server's comparison fails for other characters: each request would end in an error.
        raise InputError(name, "(not shown)", "It must be USER:PASSWORD, neither of them empty, in ASCII characters.")
    return environment[name]


def _own_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise InputError("--url", url, "Give scheme, host and port alone, such as https://prefect.lab:8443.")
    if parts.username is not None:
        raise InputError("--url", f"{parts.scheme}://...@{parts.hostname}", "User and password do not belong here.")
    return url.rstrip("/")


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(request: ServerRequest, report_progress: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; report PREFECT_API_URL once requests are accepted.

    Raises:
        InputError: the address would leave the server open or is in use, or the database cannot be used.
        RuntimeError: the server did not start; its log has the reason.
    """
    # Before the imports, which take seconds.
    decide_access(request)
    with _listening(request.host, request.port) as listener:
        access = decide_access(request.model_copy(update={"port": int(listener.getsockname()[1])}))
        choose_database(request.database)
        report_progress("starting Prefect's server ...")
        _settle(access)
        import asyncio

        database = asyncio.run(_prepare())
        if database.startswith("sqlite"):
            _filter_sqlite_logs()
        from prefect.settings import PREFECT_SERVER_DATABASE_DRIVER, temporary_settings

        # Clients may read these settings, where the database's address is hidden.
        with temporary_settings({PREFECT_SERVER_DATABASE_DRIVER: database.partition("://")[0]}):
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


def _filter_sqlite_logs() -> None:
    """Drop log lines that only SQLite causes: an event that found the database locked is retried.

    If the retries fail, the automation misses the end of a run, and does not change a run that has ended.
    """
    consumer = logging.getLogger("prefect.server.utilities.messaging.memory")
    consumer.addFilter(lambda record: not (record.exc_info and "database is locked" in str(record.exc_info[1])))
    actions = logging.getLogger("prefect.server.events.actions")
    actions.addFilter(lambda record: "Run is already in terminal state" not in record.getMessage())


def _serve(access: Access, listener: socket.socket, report_progress: Callable[[], None]) -> None:
    import asyncio

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
    import asyncio

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
