"""What other commands ask of Prefect's server before any work: whether it answers, and what is there."""

import os
import re
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING

import httpx

from grpo_core.errors import InputError, InputErrors

if TYPE_CHECKING:
    from prefect.client.schemas.objects import WorkPool

_TIMEOUT = httpx.Timeout(8.0, connect=3.0)
"""A busy server takes its time to answer; one that is not there says so, or nothing, at once."""

_PAGE = 200


_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")


def _shown(url: str) -> str:
    return _CREDENTIALS.sub("***@", url)


def server_url() -> str | None:
    """Address of the server's API that runs and workers of this process use; None where each run starts its own."""
    from prefect.settings import get_current_settings

    return get_current_settings().api.url


def require_server() -> None:
    """Refuse to begin when a server is configured that could not be used; without one, do nothing.

    Raises:
        InputError: it does not answer in time, asks for another password, is none of Prefect's, or is of a
            release that does not go with this one.
    """
    url = server_url()
    if url is None:
        return
    import prefect
    from packaging.version import InvalidVersion, Version

    answer = _get(url, "/admin/version")
    ours = Version(prefect.__version__)
    try:
        theirs = Version(str(answer))
    except InvalidVersion as error:
        raise _no_api(url) from error
    if theirs.major != ours.major or theirs.release[:2] < ours.release[:2]:
        hint = f"The server is Prefect {theirs} and this is {ours}: give both the same release, the server's first."
        raise InputError("PREFECT_API_URL", _shown(url), hint)


def require_pools(places: Sequence[tuple[str, str]], kind: str | None = "grpo") -> None:
    """Refuse to begin when stages are to be done on pools that are not there.

    Args:
        places: where a pool is asked for, such as `placement.rollouts.pool`, and its name.
        kind: type that the pools must be of; None for any.

    Raises:
        InputErrors: no server is configured, or a pool is missing, of another type or paused; each with its hint.
        InputError: as require_server.
    """
    if not places:
        return
    if server_url() is None:
        hint = (
            "Work pools are kept by a Prefect server, and none is configured: start one with `grpo ui`, export the "
            "PREFECT_API_URL that it prints here and on the workers; or leave the pool out to do the stage here."
        )
        raise InputErrors([InputError(place, name, hint) for place, name in places])
    require_server()
    pools = {pool.name: pool for pool in _read_pools()}
    problems = [problem for place, name in places if (problem := _pool_problem(place, name, pools, kind))]
    if problems:
        raise InputErrors(problems)


def _pool_problem(place: str, name: str, pools: "dict[str, WorkPool]", kind: str | None) -> InputError | None:
    pool = pools.get(name)
    if pool is None:
        there = ", ".join(sorted(each for each, found in pools.items() if kind in (None, found.type))) or "none"
        hint = f"The server has no such work pool; it has: {there}. `grpo worker {name}` starts a worker and makes it."
        return InputError(place, name, hint)
    if kind is not None and pool.type != kind:
        hint = f"That work pool is of type {pool.type}, and stages need one of type {kind}: name another."
        return InputError(place, name, hint)
    if pool.is_paused:
        hint = f"That work pool is paused, and nothing would be done: `prefect work-pool resume {name}`."
        return InputError(place, name, hint)
    return None


def workers_online(pool: str) -> int:
    """How many workers of a pool have been heard of lately; 0 for a pool that does not exist."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    with get_client(sync_client=True) as client:
        try:
            workers = client.read_workers_for_work_pool(pool)
        except PrefectHTTPStatusError as error:
            if error.response.status_code != 404:
                raise
            return 0
    return sum(worker.status == "ONLINE" for worker in workers)


def server_database() -> str | None:
    """What the configured server keeps its records in, `sqlite` or `postgresql`; None where it does not tell.

    Raises:
        InputError: as require_server.
    """
    url = server_url()
    settings = _get(url, "/admin/settings") if url else None
    if not isinstance(settings, dict):
        return None
    driver = settings.get("server", {}).get("database", {}).get("driver")
    return driver.partition("+")[0] if isinstance(driver, str) else None


def _read_pools() -> "list[WorkPool]":
    from prefect.client.orchestration import get_client

    pools: list[WorkPool] = []
    with get_client(sync_client=True) as client:
        while page := client.read_work_pools(limit=_PAGE, offset=len(pools)):
            pools += page
    return pools


def _get(url: str, path: str) -> object:
    """One answer of the API. Prefect's own client would go on trying for minutes."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    headers = dict(settings.client.custom_headers)
    secret = settings.api.auth_string
    credentials = tuple(secret.get_secret_value().split(":", 1)) if secret is not None else ()
    verify: ssl.SSLContext | bool = not settings.api.tls_insecure_skip_verify
    if verify and settings.api.ssl_cert_file:
        verify = ssl.create_default_context(cafile=settings.api.ssl_cert_file)
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}{path}",
            headers=headers,
            auth=(credentials[0], credentials[1]) if len(credentials) == 2 else None,
            verify=verify,
            timeout=_TIMEOUT,
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InputError(
            "PREFECT_API_URL", _shown(url), "It must be as `grpo ui` prints it: http://HOST:PORT/api."
        ) from error
    except httpx.TransportError as error:
        hint = (
            f"No server answers there ({error or type(error).__name__}). Start it with `grpo ui` on its machine, hint "
            "the address, or unset PREFECT_API_URL: a run without pools then uses a temporary server of its own."
        )
        raise InputError("PREFECT_API_URL", _shown(url), hint) from error
    if answer.status_code in (401, 403):
        given = "(not shown)" if secret is not None else os.environ.get("PREFECT_API_AUTH_STRING", "not set")
        hint = f"The server at {_shown(url)} asks for another USER:PASSWORD; set the one it was started with."
        raise InputError("PREFECT_API_AUTH_STRING", given, hint)
    if answer.status_code >= 500:
        hint = f"It answered {answer.status_code}: the server, its database or a proxy in front of it is busy or away."
        raise InputError("PREFECT_API_URL", _shown(url), hint)
    if answer.status_code != 200:
        raise _no_api(url)
    try:
        return answer.json()
    except ValueError as error:
        raise _no_api(url) from error


def _no_api(url: str) -> InputError:
    return InputError(
        "PREFECT_API_URL", _shown(url), "What answers there is no API of Prefect's; does the address end in /api?"
    )
