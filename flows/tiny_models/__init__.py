"""Train the shipped tiny models again from their recipes."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from tasks.checkout import CHECKOUT

DATA = CHECKOUT / "data"


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Replace a folder by what `write` puts into a fresh one, once that is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fresh = Path(scratch) / "model"
        write(fresh)
        if folder.exists():
            folder.rename(Path(scratch) / "previous")
        fresh.rename(folder)
