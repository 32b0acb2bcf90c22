"""Roots of runs: a local disk, a bucket of an S3 server, and a disk that is soon full."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.storage.artifacts.store import ArtifactStore
from tests.servers import S3Server, forget_clients, s3_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        forget_clients()
        yield server
        forget_clients()


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of an empty bucket, with the environment that reaches it; copies of what is read go to `tmp_path`.

    Clients stay for the next test: a test that makes others, or has their requests fail, forgets them.
    """
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"s3://{s3.make_bucket()}"


@pytest.fixture
def local(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "runs"), "run")


@pytest.fixture
def remote(bucket: str) -> ArtifactStore:
    return ArtifactStore(f"{bucket}/runs", "run")


@pytest.fixture(params=["local", "remote"])
def store(request: pytest.FixtureRequest) -> ArtifactStore:
    found: ArtifactStore = request.getfixturevalue(request.param)
    return found
