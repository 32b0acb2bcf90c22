"""What commands check on Prefect's server before any work: that it answers, and that its pools are there.

During a run it is watched, since Prefect's clients retry without a word: the run says when it goes away and is back.
"""

import contextlib
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from flows.server.temporary import is_temporary
from grpo_core.errors import InputError, joined, raise_all
from tasks.progress import log

if TYPE_CHECKING:
    from prefect.client.schemas.objects import WorkPool
    from prefect.context import SettingsContext


_TIMEOUT_SECONDS = 8.0
# Prefect's client connects up to four times, with pauses of 1.5 s in total.
_CONNECT_SECONDS = 0.875
_PAGE = 200
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")

KIND = "grpo"
"""Type of the work pools that `grpo worker` serves."""


def server_url() -> str | None:
    """Return the address of the configured API; None if this process starts a temporary server."""
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url
    return None if url is None or is_temporary(url) else url


def is_cloud() -> bool:
    """Return whether the configured server is Prefect Cloud, which has no `/admin` routes."""
    from prefect.client.base import ServerType, determine_server_type

    return determine_server_type() == ServerType.CLOUD


def without_retries() -> "SettingsContext":
    """Return a context in which Prefect's clients send each request once; `temporary_settings` takes 40 ms."""
    from prefect.context import SettingsContext, get_settings_context

    context = get_settings_context()
    client = context.settings.client.model_copy(update={"max_retries": 0})
    return SettingsContext(profile=context.profile, settings=context.settings.model_copy(update={"client": client}))


def refuse_closed_address() -> None:
    """Refuse an address in the environment at which nothing listens; Prefect, which takes seconds, is not imported.

    What answers is for `require_server` to ask, and also what a proxy or one of Prefect's profiles leads to.
    """
    url = os.environ.get("PREFECT_API_URL", "")
    try:
        parts = urlsplit(url)
        usual = {"http": 80, "https": 443}[parts.scheme]
        host, port = parts.hostname, parts.port or usual
    except (ValueError, KeyError):
        return
    if not host or is_temporary(url) or (getproxies().get(parts.scheme) and not proxy_bypass(host)):
        return
    try:
        socket.create_connection((host, port), timeout=_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise _no_answer(url, error) from error


def require_server() -> None:
    """Refuse a configured server that does not answer, asks another password, or is not a compatible Prefect."""
    url = server_url()
    if url is None:
        return
    if is_cloud():
        _request(url, "POST", "/work_pools/filter", {"limit": 1})
        return
    import prefect
    from packaging.version import InvalidVersion, Version

    ours = Version(prefect.__version__)
    try:
        theirs = Version(str(_request(url, "GET", "/admin/version")))
    except InvalidVersion as error:
        raise _not_prefect(url) from error
    if theirs.major != ours.major or theirs.release[:2] < ours.release[:2]:
        hint = f"The server is Prefect {theirs} and this is {ours}: give both the same release, the server's first."
        raise InputError("PREFECT_API_URL", shown_url(url), hint)


def answers(url: str) -> bool:
    """Return whether the server at this address, which was usable before, answers in time."""
    try:
        _request(url, "GET", "/health")
    except InputError:
        return False
    return True


def require_configured(place: str, value: str) -> None:
    """Refuse a setting that needs a server which several programs use."""
    if server_url() is None:
        hint = "It belongs to a server: start one with `grpo ui`, and export the PREFECT_API_URL that it prints."
        raise InputError(place, value, hint)
    require_server()


def require_ui(place: str, value: str) -> None:
    """Refuse a setting that needs a person in the UI when each run has a temporary server of its own."""
    if server_url() is None:
        hint = "A temporary server has no UI to resume a run: export the PREFECT_API_URL of `grpo ui`, or choose stop."
        raise InputError(place, value, hint)


def require_pools(places: Sequence[tuple[str, str]]) -> None:
    """Refuse pools that are missing, paused or of another type; `places` has a setting and the pool that it names."""
    if not places:
        return
    if server_url() is None:
        hint = (
            "Work pools belong to a Prefect server, and none is configured: start one with `grpo ui`, export the "
            "PREFECT_API_URL that it prints here and on the workers; or leave the pool out to run the stage here."
        )
        raise joined(InputError(place, name, hint) for place, name in places)
    require_server()
    pools = {pool.name: pool for pool in _read_pools()}
    problems = [problem for place, name in places if (problem := _pool_problem(place, name, pools))]
    raise_all(problems)


def _pool_problem(place: str, name: str, pools: "dict[str, WorkPool]") -> InputError | None:
    pool = pools.get(name)
    if pool is None:
        there = ", ".join(sorted(each for each, found in pools.items() if found.type == KIND)) or "none"
        hint = f"There is no such work pool; there is: {there}. `grpo worker {name}` creates it and starts a worker."
    elif pool.type != KIND:
        hint = f"That work pool is of type {pool.type}, and stages need one of type {KIND}: name another."
    elif pool.is_paused:
        hint = f"That work pool is paused: `prefect work-pool resume {name}`."
    else:
        return None
    return InputError(place, name, hint)


def _read_pools() -> "list[WorkPool]":
    from prefect.client.orchestration import get_client

    pools: list[WorkPool] = []
    with get_client(sync_client=True) as client:
        while page := client.read_work_pools(limit=_PAGE, offset=len(pools)):
            pools += page
    return pools


def workers_online(pool: str) -> int:
    """Return how many workers of a pool sent a heartbeat lately."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return sum(worker.status == "ONLINE" for worker in client.read_workers_for_work_pool(pool))


def server_database() -> str | None:
    """Return `sqlite` or `postgresql`, what the configured server uses; None if it does not say."""
    url = server_url()
    settings = _request(url, "GET", "/admin/settings") if url and not is_cloud() else None
    if not isinstance(settings, dict):
        return None
    driver = settings.get("server", {}).get("database", {}).get("driver")
    return driver.partition("+")[0] if isinstance(driver, str) else None


def _request(
    url: str,
    method: Literal["GET", "POST"],
    path: Literal["/admin/settings", "/admin/version", "/health", "/work_pools/filter"],
    content: Mapping[str, object] | None = None,
) -> object:
    """Send one request, with the configured key or password; by default Prefect's client would retry for minutes."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    limits = {"timeout": httpx.Timeout(_TIMEOUT_SECONDS, connect=_CONNECT_SECONDS)}
    try:
        with without_retries(), get_client(httpx_settings=limits, sync_client=True) as client:
            return client.request(method, path, json=content).json()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError) as error:
        raise _not_prefect(url) from error
    except httpx.TransportError as error:
        raise _no_answer(url, error) from error
    except PrefectHTTPStatusError as error:
        raise _refusal(url, error.response.status_code) from error


def _no_answer(url: str, error: Exception) -> InputError:
    hint = (
        f"No server answers there ({error or type(error).__name__}). Start it with `grpo ui` on its machine, "
        "correct the address, or unset PREFECT_API_URL: a run without pools then uses a temporary server."
    )
    return InputError("PREFECT_API_URL", shown_url(url), hint)


def _refusal(url: str, status: int) -> InputError:
    from prefect.settings import get_current_settings

    if is_cloud() and status in (401, 403, 404):
        given = "(not shown)" if get_current_settings().api.key else "not set"
        hint = f"Prefect Cloud answered {status} at {shown_url(url)}: set an API key, as `prefect cloud login` does."
        return InputError("PREFECT_API_KEY", given, hint)
    if status in (401, 403):
        given = "(not shown)" if os.environ.get("PREFECT_API_AUTH_STRING") else "not set"
        hint = f"The server at {shown_url(url)} wants another USER:PASSWORD; set the one that it was started with."
        return InputError("PREFECT_API_AUTH_STRING", given, hint)
    if status >= 500:
        hint = f"It answered {status}: the server, its database or a proxy in front of it is busy or down."
        return InputError("PREFECT_API_URL", shown_url(url), hint)
    return _not_prefect(url)


def _not_prefect(url: str) -> InputError:
    hint = "This is not the address of a Prefect API; it must be as `grpo ui` prints it: http://HOST:PORT/api."
    return InputError("PREFECT_API_URL", shown_url(url), hint)


def shown_url(url: str) -> str:
    """Return an address without the password in it."""
    return _CREDENTIALS.sub("***@", url)


_SECONDS_BETWEEN_ASKS = 5.0

_ASKS = 2
"""So many in a row without an answer are a server that is gone: one may be lost, or be slow for a moment."""


@contextlib.contextmanager
def watching_server() -> Iterator[None]:
    """Watch the configured server inside the context; nothing happens without one, or with Prefect Cloud."""
    url = server_url()
    if url is None or is_cloud():
        yield
        return
    ended, logger = threading.Event(), logging.getLogger("prefect._internal.concurrency")
    arguments = (_watch, url, ended)
    watch = threading.Thread(target=copy_context().run, args=arguments, name="server watch", daemon=True)
    logger.addFilter(is_not_about_an_unreachable_server)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        logger.removeFilter(is_not_about_an_unreachable_server)


def _watch(url: str, ended: threading.Event) -> None:
    unanswered = 0
    while not ended.wait(_SECONDS_BETWEEN_ASKS):
        if not answers(url):
            unanswered += 1
            if unanswered == _ASKS and not ended.is_set():
                log(
                    f"Prefect's server at {shown_url(url)} does not answer. The run goes on, and where it needs the "
                    "server it waits for it, about four minutes at most"
                )
            continue
        if unanswered >= _ASKS:
            log(f"Prefect's server at {shown_url(url)} answers again")
        unanswered = 0


def is_not_about_an_unreachable_server(record: logging.LogRecord) -> bool:
    """Whether something is worth printing: not an error of a background service that could not reach its server."""
    from httpx import TransportError
    from websockets.exceptions import WebSocketException

    # Services log inside `except`, without the exception.
    unreachable = isinstance(sys.exc_info()[1], OSError | TransportError | WebSocketException)
    return record.levelno < logging.ERROR or not unreachable
