"""Servers of a test's own, on loopback with private folders: a real PostgreSQL (Debian's package), and `grpo ui`."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import fsspec
import httpx
import pytest

from tasks.storage import roots

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


_STARTED_WITHIN = 120.0
_NEVER = 10**9


@dataclass(frozen=True)
class S3Server:
    """A running server.

    Attributes:
        endpoint: its address.
        log: one line a request.
        key: of an access that may do all; rights are looked at only inside `enforcing_rights`.
        secret: of the same.
    """

    endpoint: str
    log: Path
    key: str
    secret: str

    @property
    def environment(self) -> dict[str, str]:
        """What clients of this server need."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self) -> str:
        """The name of an empty bucket."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self._client("s3").create_bucket(Bucket=name)
        return name

    def make_user(self, *actions: str) -> dict[str, str]:
        """The environment of a user who may do these things alone, such as `s3:GetObject`."""
        iam, name = self._client("iam"), f"user-{uuid.uuid4().hex[:8]}"
        iam.create_user(UserName=name)
        statement = f'{{"Effect": "Allow", "Action": {str(list(actions)).replace(chr(39), chr(34))}, "Resource": "*"}}'
        policy = f'{{"Version": "2012-10-17", "Statement": [{statement}]}}'
        if actions:
            iam.put_user_policy(UserName=name, PolicyName="rights", PolicyDocument=policy)
        made = iam.create_access_key(UserName=name)["AccessKey"]
        keys = {"AWS_ACCESS_KEY_ID": made["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"]}
        return {**self.environment, **keys}

    @contextlib.contextmanager
    def enforcing_rights(self) -> Iterator[None]:
        """Signatures and rights count, as they do elsewhere."""
        self._enforce_after(0)
        try:
            yield
        finally:
            self._enforce_after(_NEVER)

    def requests(self, start: int = 0) -> list[str]:
        """`METHOD /path` of every request since the one with this number."""
        lines = [line.split('"')[1] for line in self.log.read_text().splitlines() if '" ' in line and "HTTP/" in line]
        return [line.rsplit(" ", 1)[0] for line in lines][start:]

    def _enforce_after(self, actions: int) -> None:
        httpx.post(f"{self.endpoint}/moto-api/reset-auth", content=str(actions)).raise_for_status()

    @cache  # noqa: B019  (as long as the server)
    def _client(self, service: str):  # type: ignore[no-untyped-def]
        keys = {"aws_access_key_id": self.key, "aws_secret_access_key": self.secret}
        return boto3.client(service, endpoint_url=self.endpoint, region_name="us-east-1", **keys)


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server on a free port of loopback, ended afterwards.

    Args:
        folder: for its log.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = S3Server(f"http://127.0.0.1:{port}", folder / "requests.log", "key", "secret")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with server.log.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        _await(server, process)
        yield server
    finally:
        process.kill()
        process.wait()


def _await(server: S3Server, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + _STARTED_WITHIN
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{server.endpoint}/moto-api/", timeout=5)
            return
        time.sleep(0.1)
    raise RuntimeError(f"the S3 server did not start: {server.log.read_text()}")


def forget_clients() -> None:
    """Clients of fsspec keep the address and keys that they were made with."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    roots._s3_session.cache_clear()


_UI_STARTING_SECONDS = 120.0


class GrpoUi:
    """The command, which can be killed and started again on the same port; it writes to Prefect's home."""

    def __init__(self, home: Path, environment: Mapping[str, str], *arguments: str) -> None:
        home.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._home, self._arguments = home, arguments
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self.environment = inherited | {"PREFECT_HOME": str(home)} | dict(environment)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def said(self) -> str:
        """Everything that it wrote to stdout and stderr."""
        return (self._home / "said").read_text()

    def start(self) -> None:
        """Start it, and wait until it says how it is reached."""
        before = self.said.count("export PREFECT_API_URL") if (self._home / "said").exists() else 0
        command = [sys.executable, "-m", "flows.command_line.main", "ui", "--port", str(self.port), *self._arguments]
        with (self._home / "said").open("ab") as said:
            self.process = subprocess.Popen(
                command, env=self.environment, stdout=said, stderr=said, start_new_session=True
            )
        deadline = time.monotonic() + _UI_STARTING_SECONDS
        while self.said.count("export PREFECT_API_URL") == before:
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.1)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code, negative if the signal ended it."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def group_is_gone(self) -> bool:
        """Whether no process that it started is left."""
        assert self.process is not None
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False


@contextmanager
def grpo_ui(home: Path, environment: Mapping[str, str], *arguments: str) -> Iterator[GrpoUi]:
    """A running server, ended afterwards."""
    ui = GrpoUi(home, environment, *arguments)
    try:
        ui.start()
        yield ui
    finally:
        if ui.process is not None and ui.process.poll() is None:
            ui.end(signal.SIGKILL)
