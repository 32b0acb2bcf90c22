"""Source images: the images in prompts, which a policy edits or answers questions about.

They are read once when the prompts are, to know their digests and sizes and to refuse what is no image. After that only
references are in memory: an image is read again from its place when a run stores it.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import NamedTuple

from grpo_core.errors import InputError
from grpo_core.rollouts.images import SourceImage, open_image, to_rgb
from grpo_core.rollouts.streams import MAX_PIXELS, ImageSize
from tasks.prompts.files import join_uri, nearest_names, read_input_file
from tasks.prompts.formats import ImageRow
from tasks.prompts.images import complete_image, name_inside, upright_size
from tasks.prompts.marks import mark_images, require_match
from tasks.prompts.text_formats import PromptRow

SOURCE_COLUMNS = ("image", "images")
"""Columns with the images in prompts where the configuration names none, in upper or lower case."""

DECODED = 1000  # the first images of a prompt file are decoded when they are read; of the others only the headers are

_ROWS_AT_ONCE, _THREADS = 32, 16
_FILLED = ("bytes", "image", "path", "url", "image_url")
_DATA_URI = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)
_WEB = re.compile(r"(?:https?|ftp)://", re.IGNORECASE)
_SHOWN = 60


@dataclass(frozen=True)
class SourceColumns:
    """Which columns of a prompt file are images in prompts."""

    column: str | None = None  # name of the one; None for those of :data:`SOURCE_COLUMNS` that the file has
    max_pixels: int = MAX_PIXELS  # largest width times height of an image
    limit: int | None = None  # number of rows whose images are read; None for all


@dataclass(frozen=True)
class SourceReference:
    """A source image that was a valid image when the prompts were read. Two with one digest are the same."""

    digest: str  # sha256 of the file's bytes, 64 hexadecimal digits
    size: ImageSize  # upright, in pixels
    place: str = field(compare=False)  # row and column that name it, for errors
    name: str = field(compare=False)  # the file, or what the row has in its place
    read: Callable[[], bytes] = field(compare=False, repr=False)  # returns the bytes, from their place or from memory

    def load(self) -> bytes:
        """Return the file's bytes, verified; InputError if they are gone or others."""
        content = self.read()
        if (found := hashlib.sha256(content).hexdigest()) != self.digest:
            hint = f"It was {self.digest} when the prompts were read. Put that file back, or start the run again."
            raise InputError(self.place, f"sha256 {found}", hint)
        return content


class PromptWithSources(NamedTuple):
    """A prompt's text, in which blocks of messages have no images any more, and its images in their order."""

    text: str
    sources: tuple[SourceReference, ...]


def choose_source_columns(found: Sequence[str], wanted: SourceColumns, place: str) -> tuple[str, ...]:
    """Return the columns of a file that are images in prompts; InputError if it lacks the one that is named."""
    if wanted.column is None:
        return tuple(name for name in found if name.lower() in SOURCE_COLUMNS)
    if wanted.column not in found:
        hint = f"{place} has no such column. Nearest: {nearest_names(wanted.column, found)}."
        raise InputError("data.image_column", wanted.column, hint)
    return (wanted.column,)


def read_source_images(
    rows: Sequence[PromptRow], texts: Sequence[str], cells: Iterable[ImageRow], wanted: SourceColumns, folder: str
) -> list[PromptWithSources]:
    """Return the text and the images of each prompt, in the order of the rows.

    File names are relative to `folder`; empty is the working directory. InputError names the row of an image that is
    missing, broken, animated, too large or somewhere else, of images in several places, and of marks that do not match.
    """
    reader, found = _SourceReader(folder, wanted.max_pixels), list[PromptWithSources]()
    named, numbers = islice(zip(rows, texts, cells, strict=False), wanted.limit), count()
    with ThreadPoolExecutor(_THREADS) as pool:
        while marked := [_named_images(*each) for each in islice(named, _ROWS_AT_ONCE)]:
            references = pool.map(reader.refer, [image for _, images in marked for image in images], numbers)
            found += [PromptWithSources(text, tuple(islice(references, len(images)))) for text, images in marked]
    return [*found, *(PromptWithSources(text, ()) for text in texts[len(found) :])]


def load_source(uri: str, place: str) -> tuple[SourceImage, ImageSize]:
    """Read an image that a person names, with its upright size; InputError if no prompt can have it."""
    content = read_input_file(uri, place=place)
    return SourceImage.of(content), _SourceReader("", MAX_PIXELS).check(content, uri, place, decode=True)


class _NamedImage(NamedTuple):
    """An image as a row names it: its value, and how it is read again if it is bytes that are not kept."""

    value: object
    place: str
    again: Callable[[], object] | None = None


def _named_images(row: PromptRow, text: str, cells: ImageRow) -> tuple[str, list[_NamedImage]]:
    """Return the prompt as policies get it, and its images as its row names them."""
    filled = {name: images for name, value in cells.values.items() if (images := _listed(value))}
    if len(filled) > 1:
        hint = "Each of them has images. Fill one, or name the right one as image_column in the configuration."
        raise InputError(row.place, f"columns {', '.join(filled)}", hint)
    prompt = mark_images(text, row.place)
    if prompt.payloads and filled:
        hint = "Its messages have images too. Give them in one of the two places."
        raise InputError(f"{row.place}, column {next(iter(filled))}", f"{len(prompt.payloads)} images", hint)
    named = [_NamedImage(value, f"{row.place}, image block {k}") for k, value in enumerate(prompt.payloads, start=1)]
    for column, values in filled.items():
        for index, value in enumerate(values):
            again = None if cells.again is None else partial(_read_again, cells.again, column, index)
            which = f"{row.place}, column {column}" + (f", image {index + 1}" if len(values) > 1 else "")
            named.append(_NamedImage(value, which, again))
    require_match(prompt, len(named), row.place)
    return prompt.text, named


def _listed(value: object) -> list[object]:
    """Return the images of a cell: a list of them, one, or none; CSV has lists as JSON."""
    match value:
        case str() if value.lstrip().startswith("["):
            try:
                found = json.loads(value)
            except json.JSONDecodeError:
                return [value]
            return found if isinstance(found, list) else [value]
        case str():
            return [value] if value.strip() else []
        case list():
            return value
        case Mapping():
            return [] if all(each is None for each in value.values()) else [value]
        case _:
            return [] if value is None else [value]


def _read_again(again: Callable[[str], object], column: str, index: int) -> object:
    return next(islice(_listed(again(column)), index, None), None)


def _unwrapped(value: object) -> object:
    """Return the bytes or the name in what `datasets`, verl and OpenAI put around them."""
    while isinstance(value, Mapping):
        value = next((value[name] for name in _FILLED if value.get(name) is not None), None)
    return value


class _SourceReader:
    """Reads the images of one prompt file; a file that several rows name is read once."""

    def __init__(self, folder: str, max_pixels: int) -> None:
        self._folder, self._max_pixels = folder, max_pixels
        self._files: dict[str, SourceReference] = {}
        self._checked: dict[str, ImageSize] = {}

    def refer(self, image: _NamedImage, number: int) -> SourceReference:
        """Read and check an image, of this number in the file; several threads may."""
        value, place, decode = _unwrapped(image.value), image.place, number < DECODED
        match value:
            case bytes():
                again = image.again
                read = (lambda: value) if again is None else (lambda: _as_bytes(_unwrapped(again()), place))
                return self._checked_reference(value, f"{len(value)} bytes", place, read, decode=decode)
            case str() if value.lstrip().startswith("data:"):
                content, shown = _decode_data_uri(value.strip(), place), f"{value.strip()[:_SHOWN]}..."
                return self._checked_reference(content, shown, place, lambda: content, decode=decode)
            case str():
                return self._refer_file(value, place, decode=decode)
        hint = "Name a file in the folder of the prompt file, or give a data: URI; Parquet may have the bytes."
        raise InputError(place, image.value if value is None else value, hint)

    def _refer_file(self, value: str, place: str, *, decode: bool) -> SourceReference:
        if _WEB.match(value.strip()):
            hint = "Images are not fetched from the web. Download it into the folder of the prompt file."
            raise InputError(place, value, hint)
        empty = "Write the file name of an image there, or null for none."
        name = name_inside(value, place, folder="the folder of the prompt file", empty=empty)
        uri = join_uri(self._folder, name)
        if uri not in self._files:
            read = partial(read_input_file, uri, place=place)
            self._files[uri] = self._checked_reference(read(), uri, place, read, decode=decode)
        return replace(self._files[uri], place=place)

    def _checked_reference(
        self, content: bytes, shown: str, place: str, read: Callable[[], bytes], *, decode: bool
    ) -> SourceReference:
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._checked:
            self._checked[digest] = self.check(content, shown, place, decode=decode)
        return SourceReference(digest, self._checked[digest], place, shown, read)

    def check(self, content: bytes, shown: str, place: str, *, decode: bool) -> ImageSize:
        """Return the upright size of an image that can be used."""
        with complete_image(shown, place):
            image = open_image(content, place)
            # A JPEG with several pictures is a photo with its preview.
            if image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) > 1:
                raise InputError(place, shown, "It is animated. Save the frame that is meant as an image of its own.")
            size = upright_size(image)
            if size.pixels > self._max_pixels:
                hint = f"data.max_image_pixels is {self._max_pixels}. Make it smaller, or set that higher."
                raise InputError(place, f"{shown}, {size} pixels", hint)
            if decode or not size.pixels:
                to_rgb(image, place)
        return size


def _as_bytes(value: object, place: str) -> bytes:
    if not isinstance(value, bytes):
        hint = "It had an image when the prompts were read. Put the file back, or start the run again."
        raise InputError(place, type(value).__name__, hint)
    return value


def _decode_data_uri(value: str, place: str) -> bytes:
    start = _DATA_URI.match(value)
    try:
        if start is None:
            raise ValueError("it does not begin with data:image/TYPE;base64,")
        return base64.b64decode(value[start.end() :], validate=True)
    except (ValueError, binascii.Error) as error:
        hint = f"No image can be read from it ({error}). Write data:image/png;base64, and the file in base64."
        raise InputError(place, f"{value[:_SHOWN]}...", hint) from error
