"""Write an HTML page to a file, complete or not at all."""

import os
import tempfile
from pathlib import Path

import fsspec

from grpo_core.errors import InputError
from tasks.storage.filesystem.files import write_file_atomically


def write_page(place: Path, page: str) -> None:
    """Write a page, whole or not at all."""
    place = place.expanduser().absolute()
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".grpo-") as scratch:
        write_file_atomically(fsspec.filesystem("file"), str(place), page.encode(), scratch=Path(scratch))


def require_page_place(html: Path) -> None:
    """Raise InputError unless a page can be written to this file."""
    folder = html.expanduser().absolute().parent
    if html.suffix.lower() not in (".html", ".htm"):
        raise InputError("--html", str(html), "Name a file that ends in .html.")
    if html.expanduser().is_dir():
        raise InputError("--html", str(html), "This is a folder. Name a file in it.")
    if not folder.is_dir():
        raise InputError("--html", str(html), f"There is no folder {folder}. Make it, or name another file.")
    if not os.access(folder, os.W_OK):
        raise InputError("--html", str(html), f"{folder} cannot be written. Name a file somewhere else.")
