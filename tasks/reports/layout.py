"""What the pages about rewards share: their layout, and how figures are written for people."""

import functools
from pathlib import Path

import jinja2
from PIL import Image

from tasks.reports.images import shrunk
from tasks.reports.page import image_uri, number, signed, small_image_uri
from tasks.reports.passages import ends

THUMBNAIL = 256
"""Longest side of an embedded image, in pixels; smaller ones stay as they are."""


def render(template: str, **values: object) -> str:
    """A page from a template below this folder: nothing in `values` is markup, and nothing may be missing.

    Args:
        template: path of the template from this folder.
        values: what it is filled with.
    """
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ends": ends,
        "figure": figure,
        "number": number,
        "percent": percent,
        "image": thumbnail_uri,
        "signed": signed,
        "small_image": small_image_uri,
    }
    return environment


def thumbnail_uri(image: Image.Image) -> str:
    """An image as a data link, made smaller where it is large."""
    return image_uri(shrunk(image if image.mode == "RGB" else image.convert("RGB"), THUMBNAIL))


def percent(share: float | None) -> str:
    """A share for people."""
    return "none" if share is None else f"{share:.1%}"


def figure(value: float | None) -> str:
    """A number of any magnitude for people."""
    return "none" if value is None else f"{value:.4g}"


def correlation(value: float | None, digits: int = 2) -> str:
    """A correlation for people: a zero has no sign."""
    return "none" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def counted(number: int, noun: str) -> str:
    """So many things, in words."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
