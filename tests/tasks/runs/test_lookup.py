"""A run of another schema version is refused, and not a byte of it changes."""

import json
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.runs.lookup import find_run
from tasks.storage.filesystem.checked_json import dump_checked
from tasks.storage.tables.schemas import SCHEMA_VERSION
from tests.tasks.reports.made_runs import contents, whole_run


@pytest.mark.parametrize(
    ("version", "content"),
    [
        (SCHEMA_VERSION - 1, dump_checked({"schema_version": SCHEMA_VERSION - 1})),
        (SCHEMA_VERSION + 1, dump_checked({"schema_version": SCHEMA_VERSION + 1})),
        (2, json.dumps({"schema_version": 2}).encode()),  # old versions wrote no checksum
    ],
)
def test_another_schema_version(tmp_path: Path, version: int, content: bytes) -> None:
    maker = whole_run(tmp_path)
    (maker.folder / "run.json").write_bytes(content)
    before = contents(maker.folder)
    with pytest.raises(InputError) as caught:
        find_run("made", str(tmp_path))
    assert (caught.value.place, caught.value.value) == ("made/run.json", f"schema version {version}")
    assert contents(maker.folder) == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b'{"checksum": "0", "schema_version": 99}'])
def test_a_damaged_description_is_not_taken_for_another_version(tmp_path: Path, content: bytes) -> None:
    maker = whole_run(tmp_path)
    (maker.folder / "run.json").write_bytes(content)
    assert find_run("made", str(tmp_path)).run == "made"
