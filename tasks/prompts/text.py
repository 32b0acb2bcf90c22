"""Prompt files that are text: decoding, files that are no text or a failed download, and prompts by line or as JSON."""

import io
import json
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from grpo_core.errors import InputError

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_MARKUP = re.compile(r"(?:\s|<!--.*?-->)*<(?:!doctype|html|head|body|\?xml)\b", re.IGNORECASE | re.DOTALL)
_LFS_POINTER = "version https://git-lfs.github.com/spec/"


class PromptRow(NamedTuple):
    """One row of a prompt file: its place, for errors (``data.prompts: FILE, line N``) and its plain JSON values."""

    place: str
    values: dict[str, object]


def decode_text(content: bytes, place: str) -> str:
    """Decode UTF-8, with or without a byte order mark, or UTF-16 with one.

    Raises:
        InputError: another encoding or no text at all, with the line; or a failed download.
    """
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
    """Yield the only prompt of a file in a folder, with the file's name as column ``file_name``.

    Raises:
        InputError: no line or several that are not blank.
    """
    lines = [line for _, line in _lines(text)]
    if len(lines) != 1:
        hint = (
            "In a folder, each .txt file is one prompt on one line. If each line is a prompt, name the file instead of "
            "the folder; write prompts with line breaks as .jsonl."
        )
        raise InputError(place, f"{len(lines)} lines", hint)
    yield PromptRow(place, {"prompt": lines[0], "file_name": name})


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers.

    Not str.splitlines, which also breaks lines at form feeds, U+0085, U+2028 and U+2029: they occur inside prompts.
    """
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
