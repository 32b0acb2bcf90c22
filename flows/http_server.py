"""The HTTP servers of this program: on which address, for whom, and how many connections they hold."""

import signal
import socket
from typing import Any

import uvicorn
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from grpo_core.services import LOOPBACK

MAX_CONNECTIONS = 512


def local_hosts_only() -> Middleware:
    """Return what refuses requests for other hosts than this machine: those of a page whose name leads here."""
    return Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, "[::1]"], www_redirect=False)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, or raise OSError or OverflowError; port 0 is any that is free."""
    if not 0 <= port < 2**16:
        raise OverflowError("ports are 0 to 65535")  # socket's own leaves the socket open
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def address_of(listener: socket.socket) -> str:
    """Return the address of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: Any, listener: socket.socket) -> None:
    """Serve an application until SIGTERM or Ctrl-C."""
    # When uvicorn has ended it raises the signal that ended it once more, for the previous handlers.
    signals = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        uvicorn.Server(server_config(app)).run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def server_config(app: Any) -> uvicorn.Config:
    """Configure uvicorn for an application."""
    return uvicorn.Config(
        app, ws="none", log_level="warning", limit_concurrency=MAX_CONNECTIONS, timeout_graceful_shutdown=10
    )
