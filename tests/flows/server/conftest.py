"""A PostgreSQL server for all tests of the server."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prefect.server.database.dependencies import (
    temporary_database_config,
    temporary_orm_config,
    temporary_query_components,
)
from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, temporary_settings

from tests.postgres_server import PostgresServer, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """With a database that a test may use as it likes, and a user who may do nothing."""
    with postgres_server() as server:
        server.sql("CREATE DATABASE prefect")
        server.sql("CREATE ROLE guest LOGIN PASSWORD 'guest'")
        yield server


@contextmanager
def server_of(url: str) -> Iterator[None]:
    """What is called here belongs to a server with this database."""
    settings = temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: url})
    # A server has one database for its lifetime, and Prefect keeps what it made of the first address.
    with settings, temporary_database_config(None), temporary_query_components(None), temporary_orm_config(None):
        yield
