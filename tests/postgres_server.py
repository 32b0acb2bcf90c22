"""A real PostgreSQL server of the test's own: Debian's package, on loopback, with a private data folder."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

USER = "grpo"
PASSWORD = "pass/word@:%1"
"""With characters that a URL must escape."""

_STARTING_SECONDS = 60.0


class PostgresServer:
    """A server that can be stopped and started again.

    Args:
        programs: the folder of PostgreSQL's programs.
        folder: a private one, which holds the data and the server's log.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        secret = folder / "password"
        secret.write_text(PASSWORD)
        # PostgreSQL refuses to run as root.
        self._owner: dict[str, Any] = {}
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            self._owner = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            for path in (folder, secret):
                os.chown(path, account.pw_uid, account.pw_gid)
        self._run("initdb", "-D", self._data, "-U", USER, "--pwfile", str(secret), "-A", "scram-sha-256", "-E", "UTF8")

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    @property
    def log(self) -> str:
        """What the server wrote."""
        return (self._folder / "log").read_text()

    def _run(self, program: str, *arguments: str) -> str:
        environment = {**os.environ, "PGPASSWORD": PASSWORD, "LC_ALL": "C.UTF-8"}
        ended = subprocess.run(
            [str(self._programs / program), *arguments],
            cwd=self._folder,
            env=environment,
            capture_output=True,
            text=True,
            **self._owner,
        )
        assert ended.returncode == 0, f"{program}: {ended.stdout}{ended.stderr}"
        return str(ended.stdout)

    def start(self) -> None:
        """Start it on its port and wait until it answers."""
        settings = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "fsync": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._programs / "postgres"), "-D", self._data, *options],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._owner,
            )
        deadline = time.monotonic() + _STARTING_SECONDS
        ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready).returncode != 0:
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.1)

    def stop(self) -> None:
        """End it, connections and all."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(_STARTING_SECONDS)
            self._process = None

    def sql(self, statement: str, database: str = "postgres") -> str:
        """What one statement gives, as unaligned text."""
        place = ["-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", database]
        return self._run("psql", *place, "-v", "ON_ERROR_STOP=1", "-Atc", statement).strip()

    def url(self, database: str, *, user: str = USER, password: str = PASSWORD) -> str:
        """Address of a database as Prefect takes it, the password escaped."""
        from urllib.parse import quote

        return f"postgresql+asyncpg://{user}:{quote(password, safe='')}@127.0.0.1:{self.port}/{database}"


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server; the test is skipped where PostgreSQL is not installed."""
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    # Not below pytest's folders: the user postgres may not enter those of root.
    folder = Path(tempfile.mkdtemp(prefix="grpo-postgres-"))
    try:
        server = PostgresServer(programs, folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
