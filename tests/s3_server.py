"""A server of the S3 protocol on loopback: moto's, in a process of its own."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import fsspec
import httpx

from tasks.storage.filesystem import roots

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
