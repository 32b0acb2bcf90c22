"""A limit on the whole of an exchange over a connection; a client's own starts anew with every byte."""

import socket
import threading
from collections.abc import Mapping
from types import TracebackType


class Watch:
    """Ends the connection that is made inside the block when the time has passed, whatever is going on over it.

    Args:
        timeout_s: from the beginning of the block, in seconds.

    Attributes:
        passed: whether the time has passed inside the block.
    """

    def __init__(self, timeout_s: float) -> None:
        self.passed = False
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def __enter__(self) -> "Watch":
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._let_go()

    def trace(self, event: str, info: Mapping[str, object]) -> None:
        """Takes note of a connection; the ``trace`` extension of a request to httpx."""
        if not event.endswith("connect_tcp.complete"):
            return
        made = info["return_value"].get_extra_info("socket")  # type: ignore[attr-defined]
        with self._lock:
            self._let_go()
            # A handle of its own: TLS takes the first one over.
            self._connection = made.dup()
            if self.passed:
                self._shut()

    def _end(self) -> None:
        with self._lock:
            self.passed = True
            self._shut()

    def _shut(self) -> None:
        if self._connection is None:
            return
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended by itself

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
