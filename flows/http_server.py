"""The HTTP servers of this program: on which address, for whom, and how many connections they hold."""

import asyncio
import signal
import socket
from typing import Any

import uvicorn
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from grpo_core.services import LOOPBACK

SECONDS_TO_ARRIVE = 10.0
"""After which a connection is closed on which no request has arrived."""
MAX_WAITING, MAX_CONNECTIONS = 256, 512
"""Connections on which no request has arrived, of which one more closes the first; and all together."""


def local_hosts_only() -> Middleware:
    """Return what refuses requests for other hosts than this machine: those of a page whose name leads here."""
    return Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, "[::1]"], www_redirect=False)


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 is any that is free.

    Raises:
        OSError, OverflowError: it cannot listen there.
    """
    if not 0 <= port < 2**16:
        raise OverflowError("ports are 0 to 65535")  # socket's own leaves the socket open
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def address_of(listener: socket.socket) -> str:
    """Return the address of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: Any, listener: socket.socket, seconds_to_arrive: float = SECONDS_TO_ARRIVE) -> None:
    """Serve an application until SIGTERM or Ctrl-C."""
    # When uvicorn has ended it raises the signal that ended it once more, for the previous handlers.
    signals = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        uvicorn.Server(server_config(app, seconds_to_arrive)).run(sockets=[listener])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def server_config(app: Any, seconds_to_arrive: float = SECONDS_TO_ARRIVE) -> uvicorn.Config:
    """Configure uvicorn so that it also closes connections on which no request arrives, and has room for others."""
    waiting: dict[Any, None] = {}

    class Connection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
        """uvicorn's own time limit holds between two requests, and ends with the first byte of the second."""

        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            self._stop()

        def _watch(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._waiting is None:
                self._waiting = self.loop.call_later(seconds_to_arrive, self.transport.close)
                waiting[self] = None
                if len(waiting) > MAX_WAITING:
                    # That which has waited longest: a request arrives at once, if one is meant.
                    next(iter(waiting)).transport.close()

        def _stop(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
                del waiting[self]

    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_level="warning",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=10,
    )
