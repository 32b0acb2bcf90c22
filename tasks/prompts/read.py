"""Prompt files, read into prompts with stable names."""

import difflib
import hashlib
import json
import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
from fsspec.core import url_to_fs

from grpo_core.errors import InputError
from tasks.prompts.formats import PromptRow, read_rows

PROMPT_COLUMNS = ("prompt", "prompt_en", "prompt_raw", "Prompt", "Prompts", "instruction")
"""Names of the prompt column; the first that a file has is used."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set.

    Attributes:
        prompt_id: 16 hexadecimal digits from the text and its number of earlier occurrences in the set;
            independent of file format, path and other columns.
        text: the prompt without surrounding white space.
        columns: every other column by name, as plain JSON values; an empty cell of a CSV or TSV file is None.
    """

    prompt_id: str
    text: str
    columns: Mapping[str, object] = field(hash=False)


def read_prompts(source: str | Path, *, column: str | None = None, limit: int | None = None) -> tuple[Prompt, ...]:
    """Read the prompts of a file, in its order.

    Formats: ``.txt`` (one per line), ``.jsonl``, ``.json`` (JSONL or one array), ``.csv``, ``.tsv``, ``.parquet``. Text
    is UTF-8, with or without a byte order mark; blank lines are skipped.

    Args:
        column: the column of the prompt; by default the first of :data:`PROMPT_COLUMNS` that the file has.
        limit: use only the first prompts, this many. The complete file is still read and must be well-formed.

    Raises:
        InputError: the file cannot be read, is malformed, or has no prompts; or a prompt is missing or not text.
    """
    if limit is not None and limit < 1:
        raise InputError("data.limit", limit, "Give at least 1, or leave it out for all prompts.")
    place = f"data.prompts: {source}"
    content = read_input_file(str(source), place="data.prompts")
    texts = PROMPT_COLUMNS if column is None else (*PROMPT_COLUMNS, column)
    rows = read_rows(content, name=str(source), place=place, text_columns=texts)
    if not rows:
        raise InputError(place, "no prompts", "Put at least one prompt into the file.")
    chosen = _choose_column(rows, column, place)
    seen: Counter[str] = Counter()
    prompts = []
    for row in rows[:limit]:
        text = _prompt_text(row, chosen)
        others = {name: value for name, value in row.values.items() if name != chosen}
        prompt_id = hashlib.sha256(json.dumps([text, seen[text]]).encode()).hexdigest()[:16]
        prompts.append(Prompt(prompt_id, text, others))
        seen[text] += 1
    return tuple(prompts)


def _choose_column(rows: Sequence[PromptRow], column: str | None, place: str) -> str:
    found = tuple(dict.fromkeys(name for row in rows for name in row.values))
    listed = ", ".join(found) or "none"
    if column is not None:
        if column in found:
            return column
        raise InputError(
            place, f"no column {column}", f"Columns found: {listed}. Nearest: {nearest_names(column, found)}."
        )
    for candidate in PROMPT_COLUMNS:
        if candidate in found:
            return candidate
    hint = f"Rename the column of the prompts to one of {', '.join(PROMPT_COLUMNS)}, or name it in the configuration."
    raise InputError(place, f"columns {listed}", f"None of them is a known prompt column. {hint}")


def _prompt_text(row: PromptRow, column: str) -> str:
    value = row.values.get(column)
    if isinstance(value, str) and value.strip():
        return value.strip()
    wanted = "Write the prompt there, or remove the row."
    if value is not None and not isinstance(value, str):
        wanted = "A prompt is text. Put it in quotes, or name the column with the text."
    raise InputError(f"{row.place}, column {column}", value, wanted)


def read_input_file(uri: str, *, place: str) -> bytes:
    """Read one file.

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
