"""The checkout that this process runs, its user's cache, the environment of its children, pauses of collection."""

import gc
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def environment(**settings: str) -> dict[str, str]:
    """Return this process's environment with these settings, and with the checkout in the Python path."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", **settings}


def user_cache() -> Path | None:
    """Return the folder for what this project can make again, in the user's cache folder; None without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "grpo"
    except RuntimeError:
        return None


def code_version() -> str | None:
    """Return the checkout's commit, with `-dirty` where files were changed; None outside a git checkout."""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage in this block.

    Imports and syntax trees make hundreds of thousands of objects, almost none of them garbage. Looking through them
    again and again takes a seventh of the time of the imports, and half of that of the syntax trees.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            # To the oldest generation, as if they had survived: otherwise the next collections look through all of
            # them. What somebody else froze stays frozen.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
