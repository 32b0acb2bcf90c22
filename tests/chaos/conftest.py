"""A Prefect server that outlives the kills, and the process that forks what is killed."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL
from prefect.testing.utilities import prefect_test_harness

from flows.prefect_settings import CLIENT, SERVER

from .campaign import Fall
from .processes import ForkServer, forking
from .table import table_of

TABLE = "CHAOS_TABLE"
"""Variable with the file that the table goes to; without it the table is only printed."""


@pytest.fixture(scope="package")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What every process that is killed runs under: a server of its own kind, which no kill reaches."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CLIENT, **SERVER}.items():
            patch.setenv(name, value)
        with prefect_test_harness(server_startup_timeout=240):
            home = str(tmp_path_factory.mktemp("home"))
            yield {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "PREFECT_HOME": home, "TMPDIR": home}


@pytest.fixture(scope="package")
def fork_server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with forking(environment, tmp_path_factory.mktemp("fork-server") / "log") as server:
        yield server


@pytest.fixture(scope="package")
def noted(request: pytest.FixtureRequest) -> Iterator[Callable[[list[Fall]], None]]:
    """Takes the kills of a test; the table of all of them is shown at the end of the package's tests."""
    falls: list[Fall] = []
    yield falls.extend
    told = table_of(falls)
    if os.environ.get(TABLE):
        Path(os.environ[TABLE]).write_text(told)
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\n{told}")
