"""HTML pages: the environment of all templates; every page is one file that opens offline."""

import functools
import os
import tempfile
from pathlib import Path

import fsspec
import jinja2

from grpo_core.errors import InputError
from tasks.reports.images import image_uri, shrunk
from tasks.reports.samples import SMALL
from tasks.reports.text import excerpt, number, signed
from tasks.storage.filesystem.files import write_file_atomically

THUMBNAIL = 256
"""Longest side of an image on a page about rewards, in pixels; smaller ones are unchanged."""


def render(template: str, **values: object) -> str:
    """Fill a file of the folder `templates`; nothing in `values` is markup, and a missing value is an error."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "excerpt": excerpt,
        "image": image_uri,
        "number": number,
        "signed": signed,
        "small_image": lambda image: image_uri(shrunk(image, SMALL)),
        "thumbnail": lambda image: image_uri(shrunk(image.convert("RGB"), THUMBNAIL)),
    }
    return environment


def write_page(path: Path, page: str) -> None:
    """Write a page to a file, complete or not at all."""
    path = path.expanduser().absolute()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".grpo-") as scratch:
        write_file_atomically(fsspec.filesystem("file"), str(path), page.encode(), scratch=Path(scratch))


def require_page_path(html: Path) -> None:
    """Check that a page can be written to this file.

    Raises:
        InputError: it cannot.
    """
    folder = html.expanduser().absolute().parent
    if html.suffix.lower() not in (".html", ".htm"):
        raise InputError("--html", str(html), "Name a file that ends in .html.")
    if html.expanduser().is_dir():
        raise InputError("--html", str(html), "This is a folder. Name a file in it.")
    if not folder.is_dir():
        raise InputError("--html", str(html), f"There is no folder {folder}. Create it, or name another file.")
    if not os.access(folder, os.W_OK):
        raise InputError("--html", str(html), f"{folder} cannot be written. Name a file somewhere else.")
