"""A PostgreSQL server for all tests of the server."""

from collections.abc import Iterator

import pytest

from tests.servers import PostgresServer, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """With no database but its own."""
    with postgres_server() as server:
        yield server
