"""The database of a temporary server: a copy of an empty one that Prefect has migrated before, which takes seconds.

The first server of a release of Prefect makes it, and it is kept in the user's cache under its sha256; a copy that does
not verify is left out.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tasks.process import user_cache

_DATABASE = "prefect.db"


def database_settings(folder: Path) -> dict[str, str]:
    """Return Prefect's settings for a server with its database in this folder, copied there from the cache."""
    settings = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / _DATABASE}",
        # It would note in the user's folder that blocks are registered, for another database.
        "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
    }
    if (content := _read_template()) is None:
        return settings
    (folder / _DATABASE).write_bytes(content)
    without = ("PREFECT_SERVER_DATABASE_MIGRATE_ON_START", "PREFECT_SERVER_REGISTER_BLOCKS_ON_START")
    return settings | dict.fromkeys(without, "false")


def keep_template(folder: Path) -> None:
    """Keep the database of a server that nobody has used yet in the cache, unless there is one already."""
    if (cache := user_cache()) is None or _read_template() is not None:
        return
    partial = folder / "template.db"
    # Next time is soon enough, if the cache cannot be written.
    with contextlib.suppress(OSError, sqlite3.Error):
        with (
            contextlib.closing(sqlite3.connect(folder / _DATABASE)) as source,
            contextlib.closing(sqlite3.connect(partial)) as target,
        ):
            source.backup(target)
        content = partial.read_bytes()
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in _templates(cache):
            old.unlink(missing_ok=True)
        made = cache / f".{os.getpid()}.part"
        made.write_bytes(content)
        made.replace(cache / f"{_prefix()}{hashlib.sha256(content).hexdigest()}.db")
    partial.unlink(missing_ok=True)


def _prefix() -> str:
    return f"prefect-{importlib.metadata.version('prefect')}-"


def _templates(cache: Path) -> Iterator[Path]:
    return cache.glob("prefect-*.db")


def _read_template() -> bytes | None:
    """Return the content of the template of this release of Prefect; None if there is none, or it is damaged."""
    cache = user_cache()
    for found in _templates(cache) if cache is not None else ():
        with contextlib.suppress(OSError):
            content = found.read_bytes()
            if found.name == f"{_prefix()}{hashlib.sha256(content).hexdigest()}.db":
                return content
    return None
