"""A temporary server begins with a copy of a migrated database, if the copy is what was kept."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from flows.server import database
from flows.server.database import database_settings, keep_template

MIGRATES = "PREFECT_SERVER_DATABASE_MIGRATE_ON_START"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "grpo"


def server_folder(path: Path, rows: int = 0) -> Path:
    """A folder as of a server that runs, which has not moved its last pages into the database."""
    path.mkdir()
    database_settings(path)
    if rows:
        connection = sqlite3.connect(path / "prefect.db")
        connection.executescript("PRAGMA journal_mode = WAL; CREATE TABLE block (name TEXT)")
        connection.executemany("INSERT INTO block VALUES (?)", [(str(row),) for row in range(rows)])
        connection.commit()
        keep_template(path)
        connection.close()
    return path


def rows_of(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "prefect.db")) as connection:
        return int(connection.execute("SELECT count(*) FROM block").fetchone()[0])


def test_the_next_server_has_what_the_first_one_made_and_does_not_migrate(tmp_path: Path, cache: Path) -> None:
    server_folder(tmp_path / "first", rows=3)
    second = tmp_path / "second"
    second.mkdir()
    assert database_settings(second)[MIGRATES] == "false"
    assert rows_of(second) == 3
    assert [*cache.glob(".*")] == []
    # What this server adds is its own.
    with closing(sqlite3.connect(second / "prefect.db")) as connection:
        connection.execute("INSERT INTO block VALUES ('a run')")
        connection.commit()
    keep_template(second)
    assert rows_of(server_folder(tmp_path / "third")) == 3


@pytest.mark.parametrize("change", ["damaged", "truncated", "another release"])
def test_another_template_is_not_used_and_replaced(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    server_folder(tmp_path / "first", rows=3)
    (kept,) = cache.glob("*.db")
    content = bytearray(kept.read_bytes())
    if change == "damaged":
        content[100] ^= 1
    if change == "another release":
        monkeypatch.setattr(database, "_prefix", lambda: "prefect-9.9.9-")
    kept.write_bytes(content[:-1] if change == "truncated" else content)
    second = tmp_path / "second"
    second.mkdir()
    assert MIGRATES not in database_settings(second)
    assert not (second / "prefect.db").exists()
    server_folder(tmp_path / "third", rows=5)
    assert rows_of(server_folder(tmp_path / "fourth")) == 5
    assert len([*cache.glob("*.db")]) == 1


def test_a_cache_that_cannot_be_written_costs_no_run(tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file")
    assert rows_of(server_folder(tmp_path / "first", rows=1)) == 1
    assert cache.read_text() == "a file"
