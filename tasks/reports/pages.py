"""HTML pages: the environment of all templates; every page is one file that opens offline.

A page can be read without its script, which only filters, sorts and enlarges what is there.
"""

import base64
import functools
import hashlib
import os
import tempfile
from pathlib import Path

import fsspec
import jinja2
from jinja2.runtime import Context
from markupsafe import Markup
from PIL import Image

from grpo_core.errors import InputError
from tasks.reports.images import LOSSLESS_SIDE, image_uri, shrunk
from tasks.reports.text import excerpt, number, signed
from tasks.storage.filesystem.files import write_file_atomically

THUMBNAIL = 256
"""Longest side of an image on a page about rewards, in pixels; smaller ones are unchanged."""

MAX_BYTES = 20 * 2**20
"""Bytes of the images and long texts of a page; it says so in place of everything further."""

_TEMPLATES = Path(__file__).parent / "templates"


class _Room:
    """The bytes that the images and long texts of a page may still take."""

    def __init__(self) -> None:
        self._left = MAX_BYTES

    def take(self, content: str) -> str | None:
        """Return the content; None where it has no room."""
        size = len(content.encode())
        if size > self._left:
            return None
        self._left -= size
        return content


def render(template: str, **values: object) -> str:
    """Fill a file of the folder `templates`; nothing in `values` is markup, and a missing value is an error."""
    script = (_TEMPLATES / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = {"script": Markup(script), "script_sha256": digest, "room": _Room()}
    return _environment().get_template(template).render(**values, **own)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "excerpt": excerpt,
        "image": _image,
        "number": number,
        "signed": signed,
        "whole": _whole,
    }
    return environment


@jinja2.pass_context
def _image(context: Context, image: Image.Image, side: int | None = None, lossless: bool = True) -> str | None:
    """Encode an image as a link while the page has room for it.

    Args:
        context: of the page.
        image: of any size.
        side: longest side to which it is reduced; None keeps its size.
        lossless: whether each of its pixels matters if it is small, which is not so for a reduced image.
    """
    small = image.convert("RGB") if side is None else shrunk(image.convert("RGB"), side)
    return _whole(context, image_uri(small, lossless_side=LOSSLESS_SIDE if lossless else 0))


@jinja2.pass_context
def _whole(context: Context, content: str) -> str | None:
    room: _Room = context["room"]
    return room.take(content)


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
