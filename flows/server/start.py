"""`grpo ui`: Prefect's own server with our settings, and who may reach it."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field
from typer import Option

from configs.validation import Section
from flows.server.prefect_settings import CLIENT, LASTING_SERVER
from grpo_core.errors import InputError

AUTH_VARIABLES = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING")
"""Variables with the server's user and password; clients read the second."""

DATABASE_VARIABLES = ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_API_DATABASE_CONNECTION_URL")
"""Where Prefect reads the address of its database, the first before the second; without one it uses SQLite."""

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_SECONDS_BETWEEN_TRIES = 0.25


class ServerRequest(Section):
    """Starts Prefect's server."""

    port: int = Field(4200, ge=1, le=65535, description="port of the page and the API")
    host: str = Field("127.0.0.1", description="address to listen on; --auth is required beyond this machine")
    url: str | None = Field(None, description="address that others use, such as a TLS proxy's https://...")
    auth: Annotated[bool, Option("--auth")] = Field(
        False, description="require the USER:PASSWORD in PREFECT_SERVER_API_AUTH_STRING"
    )
    csrf: Annotated[bool, Option("--csrf")] = Field(
        False, description="protect against cross-site requests in the browser"
    )


def server_settings(request: ServerRequest, environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return Prefect's settings for the options, or refuse those that would leave the server open.

    Requests need a user and a password where other machines can reach it, and where the environment sets them.
    PREFECT_SERVER_UI_API_URL is where browsers, runs and workers find it.
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
    origins = {url, *(_address(each, request.port) for each in ([host, "127.0.0.1", "localhost"] if here else [host]))}
    database = next((environment[name] for name in DATABASE_VARIABLES if environment.get(name)), "sqlite")
    settings = {
        "PREFECT_SERVER_UI_API_URL": f"{url}/api",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(sorted(origins)),
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": str(request.csrf or not here).lower(),
        # Clients may ask for the driver, but never for the address.
        "PREFECT_SERVER_DATABASE_DRIVER": "sqlite+aiosqlite" if database.startswith("sqlite") else "postgresql+asyncpg",
    }
    return settings | ({AUTH_VARIABLES[0]: _secret(environment)} if auth else {})


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
    """Run `prefect server start` in this process, which ends with it; report PREFECT_API_URL once it answers."""
    settings = server_settings(request)
    _require_free_port(request)
    report_progress("starting Prefect's server ...")
    # Prefect reads the environment when it is imported.
    for name, value in LASTING_SERVER.items():
        os.environ.setdefault(name, value)
    # Other commands report failures themselves, so their console shows no logs.
    if os.environ.get("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL") == CLIENT["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"]:
        os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "NOTSET"
    os.environ.update(settings)
    # The server would show a client's address to browsers as its own.
    os.environ.pop("PREFECT_API_URL", None)
    here = f"{_address(_EVERYWHERE.get(request.host, request.host), request.port)}/api"
    threading.Thread(target=_prepare_server, args=(here, settings, report_progress), daemon=True).start()
    sys.argv = ["prefect", "--no-prompt", "server", "start", "--host", request.host, "--port", str(request.port)]
    # Only this command needs it, and urllib.request below; every command imports this module.
    import runpy

    runpy.run_module("prefect", run_name="__main__")


def _require_free_port(request: ServerRequest) -> None:
    """Refuse a port that another program listens on, whose answers would be taken for this server's."""
    try:
        found = socket.getaddrinfo(request.host, request.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        # Prefect reports a host that there is not.
        return
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            # As the server itself does: a connection that has just ended does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                here = _address(_EVERYWHERE.get(request.host, request.host), request.port)
                hint = (
                    f"{error.strerror}. If it is this server, started before, use that one: "
                    f"`export PREFECT_API_URL={here}/api`. Otherwise give another --port."
                )
                raise InputError("--port", request.port, hint) from error


def _prepare_server(api_url: str, settings: Mapping[str, str], report_progress: Callable[[str], None]) -> None:
    """Wait until the server answers at this address, register the automation, and report how it is reached."""
    import urllib.request

    answers = False
    while not answers:
        time.sleep(_SECONDS_BETWEEN_TRIES)
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{api_url}/health", timeout=5):
            answers = True
    # The main thread has imported Prefect by then.
    import asyncio

    from prefect.client.orchestration import PrefectClient

    from flows.server.heartbeat_automation import ensure_automation

    async def register() -> None:
        async with PrefectClient(api_url, auth_string=settings.get(AUTH_VARIABLES[0])) as client:
            await ensure_automation(client)

    asyncio.run(register())
    report_progress("For runs and workers, in their environment:")
    report_progress(f"    export PREFECT_API_URL={settings['PREFECT_SERVER_UI_API_URL']}")
    if AUTH_VARIABLES[0] in settings:
        report_progress(f"    export {AUTH_VARIABLES[1]}=...   # the user and password that the server was given")
    if settings["PREFECT_SERVER_DATABASE_DRIVER"].startswith("sqlite"):
        name = DATABASE_VARIABLES[0]
        report_progress(f"SQLite is for one machine without workers; with workers set {name} (docs/operations.md)")
