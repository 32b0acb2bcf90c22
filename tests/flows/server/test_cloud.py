"""A training on a server that answers as Prefect Cloud does; Prefect Cloud itself has not been tried."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.conftest import Runs, training_process
from tests.flows.server.cloud_like import KEY, WORKSPACE

PATIENCE_SECONDS = 180.0


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Its address, and the file of what it refused."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    refused = tmp_path / "refused"
    command = [sys.executable, "-m", "tests.flows.server.cloud_like", str(port), str(refused)]
    process = subprocess.Popen(
        command, env={"PYTHONPATH": os.environ["PYTHONPATH"], "PREFECT_HOME": str(tmp_path / "server")}
    )
    limit = time.monotonic() + PATIENCE_SECONDS
    try:
        while True:
            assert process.poll() is None
            assert time.monotonic() < limit
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.2)
        refused.write_text("")
        yield f"http://127.0.0.1:{port}", refused
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_training_sends_its_key_and_needs_no_admin_route(cloud: tuple[str, Path], tmp_path: Path) -> None:
    url, refused = cloud
    environment = {
        "PREFECT_CLOUD_API_URL": f"{url}/api",
        "PREFECT_API_URL": f"{url}{WORKSPACE}",
        "PREFECT_API_KEY": KEY,
    }
    folder, runs = tmp_path / "said", Runs(tmp_path / "runs")
    with training_process(runs, folder, environment=environment, run__iterations=1) as process:
        assert process.wait(PATIENCE_SECONDS) == 0, (folder / "err").read_text()
    # Prefect itself looks there for a default of the server, and goes on without.
    assert set(refused.read_text().splitlines()) <= {f"404 {WORKSPACE}/admin/storage"}
