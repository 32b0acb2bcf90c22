"""Read a user's files by path or fsspec URL, with a specific error for each failure."""

import difflib
import posixpath
from collections.abc import Sequence

import fsspec
from fsspec.core import url_to_fs

from grpo_core.errors import InputError


def read_input_file(uri: str, *, place: str) -> bytes:
    """Read one file.

    Args:
        uri: a plain path (``~`` is the home folder) or an fsspec URL.
        place: where the user named the file, for the error.

    Raises:
        InputError: no such file, a folder or device, no right to read it, or a URL whose file system is not installed.
    """
    filesystem, path = _resolve(uri, place)
    try:
        if filesystem.isdir(path):
            names = nearest_names("", _file_names(filesystem, path))
            raise InputError(place, uri, f"This is a folder. Name one file{' in it: ' + names if names else ''}.")
        if filesystem.exists(path) and not filesystem.isfile(path):
            # A link may lead to a pipe that blocks forever, or to an endless device.
            raise InputError(place, uri, "This is a pipe, a socket or a device. Name a file.")
        return bytes(filesystem.cat_file(path))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(place, uri, _where_else(filesystem, path)) from None
    except OSError as error:
        raise InputError(place, uri, f"It cannot be read ({error}). Make it readable or name another file.") from error


def list_input_folder(uri: str, *, place: str) -> tuple[str, ...]:
    """List the names of the files directly in a folder, in no particular order.

    Args:
        uri: a plain path (``~`` is the home folder) or an fsspec URL.
        place: where the user named the folder, for the error.

    Raises:
        InputError: no such folder, a file, no right to list it, or a URL whose file system is not installed.
    """
    filesystem, path = _resolve(uri, place)
    try:
        if filesystem.isfile(path):
            raise InputError(place, uri, "This is a file. Name the folder that contains it.")
        return _file_names(filesystem, path)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(place, uri, "There is no such folder. Correct the path.") from None
    except OSError as error:
        raise InputError(place, uri, f"It cannot be listed ({error}). Make it readable or name another.") from error


def join_uri(folder: str, name: str) -> str:
    """Return the address of a file in a folder, spelled like the folder; an empty folder is the working directory."""
    return folder + name if not folder or folder.endswith("/") else f"{folder}/{name}"


def nearest_names(name: str, names: Sequence[str], most: int = 5) -> str:
    """Return the names closest to a mistaken one, or the first few if none is close, separated by commas."""
    folded = {candidate.lower(): candidate for candidate in sorted(names, reverse=True)}
    close = [folded[match] for match in difflib.get_close_matches(name.lower(), list(folded), n=3)]
    if close:
        return ", ".join(close)
    return ", ".join(sorted(names)[:most]) + (", ..." if len(names) > most else "")


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
