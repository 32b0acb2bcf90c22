"""A server for the runs of this process: started beside the imports, ended with the process, even if that is killed.

Prefect would start one at its first request, and import its whole server into this process. If it dies before the
process, or its disk is full, the run says so at once and ends after its stage; the same command resumes it.

Its database is a copy of an empty one that Prefect has migrated before, which takes seconds. The first server of a
release of Prefect makes it, and it is kept in the user's cache under its sha256; a copy that does not verify is left
out.
"""

import atexit
import contextlib
import contextvars
import hashlib
import importlib.metadata
import logging
import os
import shutil
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from flows.server.prefect_settings import SINGLE_RUN
from tasks.execution.server_process import ServerProcess
from tasks.process import user_cache
from tasks.progress import log
from tasks.storage.files import scratch_folder

_PROGRAM = """
import gc, os, shutil, socket, sys, threading

servers = []

def end_with_parent():
    sys.stdin.buffer.read()
    ended.set()
    if servers:
        servers[0].should_exit = True
    else:
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        os._exit(0)

ended = threading.Event()
threading.Thread(target=end_with_parent, daemon=True).start()
# What the imports make stays.
gc.disable()
import uvicorn
from prefect.server.api.server import create_app

config = uvicorn.Config(create_app(), lifespan="on", log_level="error", timeout_graceful_shutdown=5)
gc.freeze()
gc.enable()
servers.append(uvicorn.Server(config))
servers[0].run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
if ended.is_set():
    shutil.rmtree(sys.argv[2], ignore_errors=True)
"""

# As Prefect sets them for its own temporary server: no UI, and only the services that a single run needs.
_ENVIRONMENT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}


class TemporaryServer(ServerProcess):
    """The server's process, with Prefect's settings beside the environment's; its output is kept for messages.

    Attributes:
        folder: of the database, deleted by the server when this process has ended.
        lost: why nothing can be reported any more; None while the server runs.
        is_ready: whether it has answered.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._scratch = contextlib.ExitStack()
        self.folder = self._scratch.enter_context(scratch_folder())
        # Before the server runs, requests wait in its queue.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.lost: str | None = None
        self.is_ready = self._closed = False
        descriptor = self._listener.fileno()
        super().__init__(
            "Prefect's temporary server",
            [sys.executable, "-c", _PROGRAM, str(descriptor), str(self.folder.parent)],
            {**_environment(settings), **database_settings(self.folder)},
            tempfile.TemporaryFile(),  # noqa: SIM115  (open as long as the server runs)
            self._listener.getsockname()[1],
            "/api/health",
            pass_fds=[descriptor],
        )

    @property
    def api_url(self) -> str:
        """Value of PREFECT_API_URL for clients."""
        return f"http://127.0.0.1:{self.port}/api"

    def close(self) -> None:
        """Have the server end, without waiting for it; it deletes its database."""
        self._closed = True
        super().close()
        self._listener.close()
        if not self.is_running:
            self._scratch.close()

    def watch(self) -> None:
        """Return once the server is closed, or lost: it has died, or its database cannot grow any more."""
        while self.lost is None and not self._closed:
            if not self.is_running:
                self._lose(f"{self.title} {self.how_it_ended()}")
            elif (error := self._full()) is not None:
                free = shutil.disk_usage(tempfile.gettempdir()).free / 2**20
                place = f"the folder for temporary files, {tempfile.gettempdir()} ({free:.1f} MiB free)"
                self._lose(f"nothing can be written in {place}: {error}. {self.title} has its database there")
            else:
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _full(self) -> str | None:
        """Return why the database's disk takes nothing more; None if it does."""
        try:
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
                file.write(bytes(_LEAST_BYTES))
        except FileNotFoundError:
            # The server has deleted its folder at its end.
            return None
        except OSError as error:
            return error.strerror or type(error).__name__
        return None

    def _lose(self, reason: str) -> None:
        from prefect.settings import get_current_settings

        if self._closed:
            return
        log(f"{reason}. The run ends after its stage, and what it has stored is kept")
        self.lost = reason
        self.close()
        # For the rest of this process, in all of its threads: nothing is sent, or reported as not sent, any more.
        get_current_settings().client.max_retries = 1
        for name in ("prefect._internal.concurrency", "prefect.events"):
            # Not by level: Prefect's own class of logger takes that from its settings.
            logging.getLogger(name).disabled = True
        logging.raiseExceptions = False


_SECONDS_BETWEEN_LOOKS = 1.0
_LEAST_BYTES = 2**16
"""What a database must be able to grow by."""

_server: TemporaryServer | None = None


def is_temporary(url: str) -> bool:
    """Whether this is the address of the server that this process has started."""
    return _server is not None and url == _server.api_url


class ServerLostError(RuntimeError):
    """The temporary server died, or its disk is full."""


def is_lost() -> bool:
    """Whether the server of this process is gone for good, so that nothing can be reported any more."""
    return _server is not None and _server.lost is not None


def require_not_lost() -> None:
    """Raise ServerLostError if the server of this process is gone for good."""
    if _server is not None and _server.lost is not None:
        raise ServerLostError(_server.lost)


def start_temporary_server() -> bool:
    """Start a server unless one is configured or was started; return whether, before it answers."""
    global _server
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    is_lost = _server is not None and _server.lost is not None and settings.api.url == _server.api_url
    if (settings.api.url and not is_lost) or not settings.server.ephemeral.enabled:
        return False
    _server = TemporaryServer(settings.to_environment_variables(exclude_unset=True))
    atexit.register(_server.close)
    # For all threads of this process, and for those that Prefect starts.
    os.environ["PREFECT_API_URL"] = _server.api_url
    refresh_global_settings_context()
    return True


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server, without the database of one that is kept."""
    given = {**SINGLE_RUN, **os.environ, **settings, **_ENVIRONMENT}
    kept = ("PREFECT_API_DATABASE_", "PREFECT_SERVER_DATABASE_", "PREFECT_API_URL")
    return {name: value for name, value in given.items() if not name.startswith(kept)}


def wait_for_temporary_server() -> None:
    """Return once the server that this process has started answers; RuntimeError if it did not start, with its log."""
    if _server is None or _server.is_ready:
        return
    from prefect.settings import get_current_settings

    seconds = get_current_settings().server.ephemeral.startup_timeout_seconds
    _server.wait_until_ready(seconds)
    _server.is_ready = True
    keep_template(_server.folder)
    watch = contextvars.copy_context().run
    threading.Thread(target=watch, args=(_server.watch,), name="temporary server", daemon=True).start()


_DATABASE = "prefect.db"


def database_settings(folder: Path) -> dict[str, str]:
    """Return Prefect's settings for a server with its database in this folder, copied there from the cache."""
    settings = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / _DATABASE}",
        # It would note in the user's folder that blocks are registered, for another database.
        "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
    }
    if (content := _read_template()) is None:
        return settings
    (folder / _DATABASE).write_bytes(content)
    without = ("PREFECT_SERVER_DATABASE_MIGRATE_ON_START", "PREFECT_SERVER_REGISTER_BLOCKS_ON_START")
    return settings | dict.fromkeys(without, "false")


def keep_template(folder: Path) -> None:
    """Keep the database of a server that nobody has used yet in the cache, unless there is one already."""
    if (cache := user_cache()) is None or _read_template() is not None:
        return
    partial = folder / "template.db"
    # Next time is soon enough, if the cache cannot be written.
    with contextlib.suppress(OSError, sqlite3.Error):
        with (
            contextlib.closing(sqlite3.connect(folder / _DATABASE)) as source,
            contextlib.closing(sqlite3.connect(partial)) as target,
        ):
            source.backup(target)
        content = partial.read_bytes()
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in _templates(cache):
            old.unlink(missing_ok=True)
        made = cache / f".{os.getpid()}.part"
        made.write_bytes(content)
        made.replace(cache / f"{_prefix()}{hashlib.sha256(content).hexdigest()}.db")
    partial.unlink(missing_ok=True)


def _prefix() -> str:
    return f"prefect-{importlib.metadata.version('prefect')}-"


def _templates(cache: Path) -> Iterator[Path]:
    return cache.glob("prefect-*.db")


def _read_template() -> bytes | None:
    """Return the content of the template of this release of Prefect; None if there is none, or it is damaged."""
    cache = user_cache()
    for found in _templates(cache) if cache is not None else ():
        with contextlib.suppress(OSError):
            content = found.read_bytes()
            if found.name == f"{_prefix()}{hashlib.sha256(content).hexdigest()}.db":
                return content
    return None
