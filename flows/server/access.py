"""Who may reach the server: the address it listens on, authentication, and what pages in a browser may do."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from grpo_core.errors import InputError

AUTH_VARIABLES = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING")
"""Variables with the server's user and password; clients read the second."""

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Access:
    """How the server can be reached.

    Attributes:
        host: address to listen on.
        port: port to listen on.
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


def decide_access(
    host: str,
    port: int,
    url: str | None = None,
    *,
    auth: bool = False,
    csrf: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Access:
    """Check the options, and refuse those that would leave the server open.

    Args:
        host: address to listen on.
        port: port to listen on.
        url: where others find the server; None for http://HOST:PORT.
        auth: whether requests need a user and a password; always true if the environment sets them for the server.
        csrf: whether to protect against other sites' pages in a browser; always true unless the host is loopback.
        environment: has the user and the password, which are never shown.

    Raises:
        InputError: other machines can reach the address without authentication; user and password are missing or
            malformed; or the URL cannot be used.
    """
    here = host in _LOOPBACK
    if not here and not (auth or environment.get(AUTH_VARIABLES[0])):
        hint = (
            "Other machines can reach this address, and could do anything on the server. Add "
            f"--auth with {AUTH_VARIABLES[0]}=USER:PASSWORD in the environment, and put a TLS proxy in front, since "
            "every request carries the password; or listen on 127.0.0.1 behind a proxy or a tunnel."
        )
        raise InputError("--host", host, hint)
    if url is None and host in _EVERYWHERE:
        hint = "Add --url with the address under which browsers, runs and workers find it, such as https://prefect.lab."
        raise InputError("--host", host, hint)
    secret = _secret(environment) if auth or environment.get(AUTH_VARIABLES[0]) else None
    return Access(host, port, _own_url(url) if url else _address(host, port), secret, csrf or not here)


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
