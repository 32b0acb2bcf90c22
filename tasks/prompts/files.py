"""Input files: found by path or URL, one or all of a folder, decoded, and read with errors that name the line."""

import difflib
import gzip
import io
import json
import math
import os
import posixpath
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import fsspec
from fsspec.core import url_to_fs

from grpo_core.errors import InputError
from tasks.storage.files import is_local

if TYPE_CHECKING:
    from tasks.storage.artifacts.store import ArtifactStore


@dataclass(frozen=True)
class InputFile:
    """A file that a configuration names, directly or by its folder; it is not open.

    InputError names `place`, the configuration's key, for a file that is missing, no file, damaged, or not to be read,
    and for a URL whose file system is not installed. `uri` is spelled like the configured one.
    """

    uri: str
    place: str
    filesystem: fsspec.AbstractFileSystem
    path: str

    def read(self) -> bytes:
        """Return the content, decompressed if the name ends in ``.gz``."""
        with self._readable():
            content = bytes(self.filesystem.cat_file(self.path))
            return gzip.decompress(content) if self.path.lower().endswith(".gz") else content

    def open(self) -> IO[bytes]:
        """Open the file to read parts of it."""
        with self._readable():
            stream: IO[bytes] = self.filesystem.open(self.path, "rb")
            return stream

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Refuse a folder or device in the place of a file, and turn the errors of the file system into InputError."""
        with _reported(self.uri, self.place, self.filesystem, self.path):
            if self.filesystem.isdir(self.path):
                names = nearest_names("", _file_names(self.filesystem, self.path))
                hint = f"This is a folder. Name one file{' in it: ' + names if names else ''}."
                raise InputError(self.place, self.uri, hint)
            if self.filesystem.exists(self.path) and not self.filesystem.isfile(self.path):
                # A link may lead to a pipe that blocks forever, or to an endless device.
                raise InputError(self.place, self.uri, "This is a pipe, a socket or a device. Name a file.")
            yield


def find_files(uri: str, *, place: str, endings: Collection[str]) -> tuple[InputFile, ...]:
    """Return the file of this name; for a folder, the files in it with one of the endings, in natural order.

    Hidden files, subfolders and files with other endings are left out. InputError if a folder has no such file, or
    files with several of the endings.
    """
    filesystem, path = _resolve(uri, place)
    with _reported(uri, place, filesystem, path):
        if not filesystem.isdir(path):
            return (InputFile(uri, place, filesystem, path),)
        names = [name for name in _file_names(filesystem, path) if not name.startswith(".")]
    files = sorted((name for name in names if file_ending(name) in endings), key=natural_key)
    if not files:
        found = f"it has {nearest_names('', names)}" if names else "it has no files at all"
        raise InputError(place, uri, f"This folder has no file with prompts ({', '.join(endings)}): {found}.")
    found_endings = {file_ending(name): name for name in reversed(files)}
    if len(found_endings) > 1:
        found = ", ".join(f"{ending} ({name})" for ending, name in sorted(found_endings.items()))
        hint = "All prompt files of a folder have one ending: name one of the files, or move the others away."
        raise InputError(place, f"{uri} with {found}", hint)
    return tuple(InputFile(join_uri(uri, name), place, filesystem, posixpath.join(path, name)) for name in files)


def read_input_file(uri: str, *, place: str) -> bytes:
    """Read one file; errors are those of InputFile."""
    return InputFile(uri, place, *_resolve(uri, place)).read()


def list_input_folder(uri: str, *, place: str) -> tuple[str, ...]:
    """List the names of the files directly in a folder, in no particular order; InputError if it cannot be."""
    filesystem, path = _resolve(uri, place)
    try:
        if filesystem.isfile(path):
            raise InputError(place, uri, "This is a file. Name the folder that contains it.")
        return _file_names(filesystem, path)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(place, uri, "There is no such folder. Correct the path.") from None
    except OSError as error:
        raise InputError(place, uri, f"It cannot be listed ({error}). Make it readable or name another.") from error


def find_input(uri: str, stores: Iterable["ArtifactStore"]) -> str | None:
    """Return where an input of a stored run is, here or beside a root; None for a relative path that leads nowhere."""
    if "://" in uri or Path(uri).expanduser().is_absolute():
        return uri
    folders = (Path(os.path.relpath(store.root)).parent for store in stores if is_local(store.filesystem))
    return next((str(folder / uri) for folder in (Path(), *folders) if os.path.exists(folder / uri)), None)


def join_uri(folder: str, name: str) -> str:
    """Return the address of a file in a folder, spelled like the folder; an empty folder is the working directory."""
    return folder + name if not folder or folder.endswith("/") else f"{folder}/{name}"


def file_ending(name: str) -> str:
    """Return the ending of a file's name in lower case, without a last ``.gz``."""
    return posixpath.splitext(name.lower().removesuffix(".gz"))[1]


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Return a sort key that compares digits as numbers; the name itself orders 1.png and 01.png."""
    parts = re.split(r"([0-9]+)", name.lower())
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name


def nearest_names(name: str, names: Sequence[str], most: int = 5) -> str:
    """Return the names closest to a mistaken one, or the first few if none is close, separated by commas."""
    folded = {candidate.lower(): candidate for candidate in sorted(names, reverse=True)}
    close = [folded[match] for match in difflib.get_close_matches(name.lower(), list(folded), n=3)]
    if close:
        return ", ".join(close)
    return ", ".join(sorted(names)[:most]) + (", ..." if len(names) > most else "")


@contextmanager
def _reported(uri: str, place: str, filesystem: fsspec.AbstractFileSystem, path: str) -> Iterator[None]:
    """Turn the errors of a file system into InputError."""
    try:
        yield
    except InputError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(place, uri, _where_else(filesystem, path)) from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(place, uri, f"It cannot be read ({error}). Make it readable or name another file.") from error
    except Exception as error:
        # Remote file systems have errors of their own: that of missing credentials is no OSError.
        if is_local(filesystem):
            raise
        hint = "Correct the address, or give its file system what it logs in with."
        raise InputError(place, uri, f"It cannot be read ({type(error).__name__}: {error}). {hint}") from error


def _resolve(uri: str, place: str) -> tuple[fsspec.AbstractFileSystem, str]:
    if not uri.strip():
        raise InputError(place, uri, "Name a file: a path or a URL such as s3://bucket/name.")
    try:
        filesystem, path = url_to_fs(uri)
    except ImportError as error:
        raise InputError(place, uri, f"{error}. It is the package that reads this kind of URL.") from error
    except ValueError as error:
        raise InputError(place, uri, f"{error}. Give a path or a URL of a known kind, such as s3://.") from error
    return filesystem, str(path)


def _file_names(filesystem: fsspec.AbstractFileSystem, path: str) -> tuple[str, ...]:
    entries = filesystem.ls(path, detail=True)
    return tuple(posixpath.basename(str(entry["name"])) for entry in entries if entry["type"] != "directory")


def _where_else(filesystem: fsspec.AbstractFileSystem, path: str) -> str:
    folder, name = posixpath.split(path)
    try:
        names = _file_names(filesystem, folder) if filesystem.isdir(folder) else None
    except OSError:
        names = ()
    if names is None:
        return f"There is no such file, nor the folder {folder}. Correct the path."
    if not names:
        return "There is no such file. Correct the path."
    return f"There is no such file. The folder contains: {nearest_names(name, names)}."


_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_MARKUP = re.compile(r"(?:\s|<!--.*?-->)*<(?:!doctype|html|head|body|\?xml)\b", re.IGNORECASE | re.DOTALL)
_LFS_POINTER = "version https://git-lfs.github.com/spec/"


class PromptRow(NamedTuple):
    """One row of a prompt file: its place, for errors (``data.prompts: FILE, line N``) and its plain JSON values."""

    place: str
    values: dict[str, object]


def decode_text(content: bytes, place: str) -> str:
    """Decode UTF-8, with or without a byte order mark, or UTF-16 with one; InputError names the line of other text."""
    try:
        # A byte order mark, as spreadsheets write it, is not part of the first field.
        text = content.decode("utf-16" if content.startswith(_UTF16_MARKS) else "utf-8-sig")
        before, broken, after = text.partition("\0")
        found: object = broken + after[:3]
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode(error.encoding, "replace")
        found = error.object[error.start : error.start + 4]
    if not found:
        refuse_failed_download(text, place)
        return text
    hint = "This is not UTF-8 text, nor UTF-16 with a byte order mark. Save it as UTF-8, or name the file with prompts."
    raise InputError(f"{place}, line {before.count(chr(10)) + 1}", found, hint)


def refuse_failed_download(text: str, place: str) -> None:
    """Raise InputError when a file, or its beginning, is a web page, an XML error or a Git LFS pointer."""
    if _MARKUP.match(text):
        hint = "The download probably failed and this is the server's error page. Open the file, and download it again."
        raise InputError(place, _shortened(text.strip().split("\n")[0]), f"This is HTML or XML. {hint}")
    if text.startswith(_LFS_POINTER):
        hint = "The repository was cloned without its large files: run `git lfs pull` in it."
        raise InputError(place, "a Git LFS pointer", hint)


def read_txt(text: str, place: str) -> Iterator[PromptRow]:
    """Yield the lines that are not blank, as column ``prompt``."""
    for number, line in _lines(text):
        yield PromptRow(f"{place}, line {number}", {"prompt": line})


def read_one_txt(text: str, place: str, name: str) -> Iterator[PromptRow]:
    """Yield the only prompt of a file in a folder, with its name as `file_name`; InputError for several lines."""
    lines = [line for _, line in _lines(text)]
    if len(lines) != 1:
        hint = (
            "In a folder, each .txt file is one prompt on one line. Name the file instead of the folder, or use .jsonl."
        )
        raise InputError(place, f"{len(lines)} lines", hint)
    yield PromptRow(place, {"prompt": lines[0], "file_name": name})


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers."""
    # str.splitlines also breaks at form feeds, U+0085, U+2028 and U+2029, which occur inside prompts.
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        if line.strip():
            yield number, line.rstrip("\n")


def read_json(text: str, place: str) -> Iterator[PromptRow]:
    """Yield the objects or the strings of JSON lines, or of one array; a string is column ``prompt``."""
    kind: type | None = None
    for where, value in _json_values(text, place):
        kind = type(value) if kind is None else kind
        if not isinstance(value, dict | str) or type(value) is not kind:
            hint = 'Give objects such as {"prompt": "a red circle"} only, or strings only.'
            raise InputError(where, value, hint)
        yield PromptRow(where, value if isinstance(value, dict) else {"prompt": value})


def _json_values(text: str, place: str) -> Iterator[tuple[str, object]]:
    if not text.lstrip().startswith("["):
        for number, line in _lines(text):
            yield f"{place}, line {number}", _parse_json(line, place, first_line=number)
        return
    items = _parse_json(text, place, first_line=1)
    assert isinstance(items, list), "JSON that begins with a bracket is an array"
    yield from ((f"{place}, item {number}", item) for number, item in enumerate(items, start=1))


def _parse_json(text: str, place: str, *, first_line: int) -> object:
    try:
        value: object = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
        # A lone surrogate (an escaped half of an emoji) is JSON, but no text: neither a tokenizer nor Parquet takes it.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"{place}, line {first_line + error.lineno - 1}"
        hint = f"Invalid JSON at column {error.colno}: {error.msg}. Give one object per line, or one array of objects."
        raise InputError(where, _shortened(text.split("\n")[error.lineno - 1]), hint) from None
    except RecursionError:
        hint = "The values are nested too deeply. Flatten them."
        raise InputError(f"{place}, line {first_line}", _shortened(text), hint) from None
    except ValueError as error:
        hint = f"Not usable as JSON: {error}. Correct the value."
        raise InputError(f"{place}, line {first_line}", _shortened(text), hint) from None
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is beyond the range of a double")
    return value


def _shortened(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[:most] + "..."
