"""Say when a server that is kept goes away during a run, and is back: Prefect's clients retry without a word."""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from contextvars import copy_context

from flows.server.reachable import answers, is_cloud, server_url, shown_url
from tasks.progress import log

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
