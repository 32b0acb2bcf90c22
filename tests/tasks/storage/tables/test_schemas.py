"""Columns change only together with the schema version."""

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.storage.tables import schemas

# The first digits of the sha256 of names and types: after a change of columns, raise SCHEMA_VERSION and write new ones.
VERSION = 4
DIGESTS: dict[str, str] = {
    "IMAGE_ROLLOUTS": "8cab17441a0ff2d6",
    "TEXT_ROLLOUTS": "79637eada634ad27",
    "REWARDS": "8aebfe298d662ab3",
    "ADVANTAGES": "ad61943162eaf6c6",
    "METRICS": "731d5254988a9344",
    "UPDATE_STEPS": "1d4cafbcd03bb648",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_a_change_of_columns_needs_another_schema_version(name: str, tmp_path: Path) -> None:
    schema: pa.Schema = getattr(schemas, name)
    pq.write_table(schema.empty_table(), tmp_path / "table.parquet")
    written = pq.read_schema(tmp_path / "table.parquet")
    columns = [(field.name, str(field.type)) for field in written]
    digest = hashlib.sha256(repr(columns).encode()).hexdigest()
    assert (schemas.SCHEMA_VERSION, digest[:16]) == (VERSION, DIGESTS[name]), columns
    assert written.metadata[b"grpo.schema_version"] == str(VERSION).encode()


def test_every_table_has_a_digest() -> None:
    assert {name for name, value in vars(schemas).items() if isinstance(value, pa.Schema)} == set(DIGESTS)
