"""Input files: found by path or URL, one or all of a folder, and read."""

import difflib
import gzip
import os
import posixpath
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

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
        # Of a file elsewhere, which is no device, nothing is asked before: each question takes as long as the file.
        with self._readable() if is_local(self.filesystem) else self._found():
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
            self._refuse_folder()
            if self.filesystem.exists(self.path) and not self.filesystem.isfile(self.path):
                # A link may lead to a pipe that blocks forever, or to an endless device.
                raise InputError(self.place, self.uri, "This is a pipe, a socket or a device. Name a file.")
            yield

    @contextmanager
    def _found(self) -> Iterator[None]:
        with _reported(self.uri, self.place, self.filesystem, self.path):
            try:
                yield
            except (FileNotFoundError, IsADirectoryError):
                self._refuse_folder()
                raise

    def _refuse_folder(self) -> None:
        if self.filesystem.isdir(self.path):
            names = nearest_names("", _file_names(self.filesystem, self.path))
            hint = f"This is a folder. Name one file{' in it: ' + names if names else ''}."
            raise InputError(self.place, self.uri, hint)


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
