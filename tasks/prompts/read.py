"""Prompt files and `datasets` repositories, read into prompts with stable names."""

import hashlib
import json
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_core.errors import InputError, first_line
from grpo_core.streams import has_visible_text
from tasks.prompts.files import PromptRow, file_ending, find_files, nearest_names
from tasks.prompts.formats import ENDINGS, PromptTable, convert_numbers, has_bytes, open_table, plain_rows

SPLIT = "train"
"""The split that is read when none is named."""

_NAME = re.compile(r"(?P<hub>hf://(datasets/)?)?(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class DatasetChoice:
    """Which part of a `datasets` repository is read, and how.

    Attributes:
        split: name of the split, or a slice of one such as `train[:1000]`; None for `train`.
        subset: name of the configuration; None where there is only one.
        revision: branch, tag or commit of the Hub; None for `main`.
        streaming: read over the network while rows are wanted, instead of downloading all files first.
    """

    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    streaming: bool = False


def names_dataset(source: str, choice: DatasetChoice) -> bool:
    """Return whether prompts are read with `datasets`: a name on the Hub, or a choice that only `datasets` knows.

    A bare `owner/name` is a path if its folder exists here, and a name on the Hub otherwise.
    """
    if choice != DatasetChoice():
        return True
    match = _NAME.fullmatch(source)
    if match is None or file_ending(source) in ENDINGS:
        return False
    return match["hub"] is not None or not Path(source).parent.exists()


def open_dataset(source: str, choice: DatasetChoice, limit: int | None) -> tuple[PromptTable, str | None]:
    """Open the rows of a dataset.

    Args:
        limit: rows to read of a stream; a downloaded split is read completely.

    Returns:
        The rows, and the commit of the Hub that they are of; None for a folder, and offline.

    Raises:
        InputError: no such dataset, subset, split or revision; no network; or `datasets` is not installed.
    """
    place = f"data.prompts: {source}"
    if choice.streaming and limit is None:
        raise InputError(
            "data.streaming", True, "A stream has no end that is known before: set limit to its first rows."
        )
    path, revision, commit = _located(source, choice)
    with _one_message(source):
        import datasets

        found = datasets.load_dataset(
            path, choice.subset, split=choice.split or SPLIT, revision=commit or revision, streaming=choice.streaming
        )
        features = found.features
        if features is None:
            # Of a stream whose files do not state their columns.
            features = found._resolve_features().features
    binary = frozenset(field.name for field in features.arrow_schema if has_bytes(field.type))

    def read(columns: Collection[str]) -> Iterator[PromptRow]:
        wanted = [name for name in features if name in columns and name not in binary]
        with _one_message(source):
            rows: Iterator[Mapping[str, Any]] = iter(found.select_columns(wanted))
            yield from plain_rows(islice(rows, limit) if choice.streaming else rows, wanted, place)

    return PromptTable(place, tuple(features), binary, read), commit


def _located(source: str, choice: DatasetChoice) -> tuple[str, str | None, str | None]:
    """Return the path or name for `datasets`, the revision, and the commit that the Hub says it is now."""
    match = _NAME.fullmatch(source)
    if Path(source).exists() or match is None:
        if choice.revision is not None:
            raise InputError("data.revision", choice.revision, "A folder has no revisions; leave it out.")
        return source, None, None
    if match["revision"] and choice.revision:
        raise InputError("data.revision", choice.revision, f"The name says {match['revision']} already; give one.")
    repo, revision = match["repo"], match["revision"] or choice.revision
    with _one_message(source):
        import huggingface_hub

        if huggingface_hub.is_offline_mode():
            # The cache has what it has; `datasets` says so where it has nothing.
            return repo, revision, None
        return repo, revision, huggingface_hub.HfApi().dataset_info(repo, revision=revision).sha


@contextmanager
def _one_message(source: str) -> Iterator[None]:
    """Turn the errors of `datasets` and of the Hub into InputError."""
    try:
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        hint = "Datasets are read with the package `datasets`: install it (pip install 'grpo-staged[datasets]')."
        raise InputError("data.prompts", source, hint) from error
    try:
        yield
    except InputError:
        raise
    # The errors of the Hub are among the second and third.
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = first_line(error).rstrip(".")
        raise InputError("data.prompts", source, f"It cannot be read ({reason}). {_way_out(source, reason)}") from error


def _way_out(source: str, reason: str) -> str:
    import huggingface_hub

    if "split" in reason.lower() or "config" in reason.lower():
        return "Set split and subset to names that the dataset has."
    if huggingface_hub.is_offline_mode() and not Path(source).exists():
        return "HF_HUB_OFFLINE forbids downloads: unset it, or name a file or folder of this machine."
    folder = Path(source).parent
    near = nearest_names(Path(source).name, [each.name for each in folder.iterdir()]) if folder.is_dir() else ""
    return f"Correct the name, or check the network{f'; {folder} has {near}' if near else ''}."


PROMPT_COLUMNS = (("prompt",), ("prompt_en",), ("prompt_raw",), ("prompts",), ("instruction",), ("caption", "text"))
"""Names of the prompt column, in upper or lower case; the first group that a file has one name of is used.

`text` comes last, because beside a prompt it is the text to render. A file with several names of the first group that
it has, such as a caption and a text or a prompt and a Prompt, does not say which is the prompt, and is refused.
"""

LONG_PROMPT = 4000
"""Characters from which on a prompt is reported: about a thousand tokens of English."""

_LISTED = 20


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set.

    Attributes:
        prompt_id: 16 hexadecimal digits from the text and its number of earlier occurrences in the set;
            independent of file format, path and other columns.
        text: the prompt without surrounding white space.
        columns: the other columns that go along, by name, as plain JSON values; an empty cell of a CSV or TSV file is
            None.
    """

    prompt_id: str
    text: str
    columns: Mapping[str, object] = field(hash=False)


@dataclass(frozen=True)
class PromptFile:
    """What a prompt file, or a folder of them, contains.

    Attributes:
        folder: folder of the file or files, spelled like the source; empty is the working directory.
        column: the column of the prompts, of messages several; `prompt` for plain text.
        prompts: in the order of the file; of a folder, in the natural order of its files' names.
        commit: of a dataset of the Hub: the commit that was read; None where it is not known.
    """

    folder: str
    column: str
    prompts: tuple[Prompt, ...]
    commit: str | None = None


def read_prompts(
    source: str | Path,
    *,
    column: str | Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    also: Collection[str] = (),
    limit: int | None = None,
    choice: DatasetChoice | None = None,
) -> PromptFile:
    """Read the prompts of a file, of all files of a folder, which have one ending, or of a `datasets` repository.

    Formats: ``.txt`` (one per line; in a folder one per file, with the column ``file_name``), ``.jsonl``, ``.json``
    (JSONL or one array, of objects or of strings), ``.csv``, ``.tsv``, ``.parquet``; all but the last may be
    compressed as ``.gz``. Text is UTF-8, or UTF-16 with a byte order mark; blank lines are skipped.

    Args:
        column: the column of the prompt; by default one of :data:`PROMPT_COLUMNS`. A mapping of roles to columns makes
            messages of them, in its order, and leaves out an empty system message.
        columns: names of the other columns that go along with a prompt; None for all that are not binary. No other
            column is read.
        also: columns that go along, where the file has them, even if `columns` does not name them.
        limit: use only the first prompts, this many. The complete file is still read and must be well-formed; of a
            stream nothing else is read.
        choice: split, subset and revision of a dataset; None for the defaults.

    Raises:
        InputError: the file or dataset cannot be read, is malformed, or has no prompts; a prompt is missing, not text,
            or invisible; or a column is unknown, ambiguous or binary.
    """
    if limit is not None and limit < 1:
        raise InputError("data.limit", limit, "Give at least 1, or leave it out for all prompts.")
    place = f"data.prompts: {source}"
    commit = None
    choice = choice or DatasetChoice()
    if names_dataset(str(source), choice):
        table, commit = open_dataset(str(source), choice, limit)
        tables, folder, typed = [table], str(source), True
    else:
        files = find_files(str(source), place="data.prompts", endings=ENDINGS)
        # Files of a bucket take long one after another.
        with ThreadPoolExecutor(min(len(files), 16)) as pool:
            tables = list(pool.map(partial(open_table, in_folder=files[0].uri != str(source)), files))
        folder, typed = posixpath.dirname(files[0].uri), file_ending(files[0].path) not in (".csv", ".tsv")
    found = tuple(dict.fromkeys(name for table in tables for name in table.columns))
    if not found:
        raise InputError(place, "no prompts", "Put at least one prompt into the file.")
    roles = column if isinstance(column, Mapping) else {"": _choose_column(found, column, place)}
    chosen = {_choose_column(found, name, place) for name in roles.values()}
    binary = {name for table in tables for name in table.binary}
    for name in sorted(chosen & binary):
        raise InputError(f"{place}, column {name}", "bytes", "A prompt is text. Write the column as text.")
    _refuse_columns(columns or (), found, binary, place)
    wanted = set(found) if columns is None else {*columns, *also}
    rows = _read_rows(tables, chosen, (wanted & set(found)) - binary)
    if not typed:
        convert_numbers(rows, text_columns=lambda name: name in chosen or _is_known(name))
    if not rows:
        raise InputError(place, "no prompts", "Put at least one prompt into the file.")
    return PromptFile(folder, ", ".join(roles.values()), _named(rows[:limit], roles), commit)


def _read_rows(tables: Sequence[PromptTable], chosen: Collection[str], along: Collection[str]) -> list[PromptRow]:
    for table in tables:
        for name in sorted(set(chosen) - set(table.columns)) if table.columns else ():
            hint = f"Other files of the folder have it; this one has {_listed(table.columns)}."
            raise InputError(table.place, f"no column {name}", hint)
    return [row for table in tables for row in table.read({*chosen, *along})]


def _named(rows: Iterable[PromptRow], roles: Mapping[str, str]) -> tuple[Prompt, ...]:
    seen: Counter[str] = Counter()
    prompts = []
    for row in rows:
        text = _prompt_text(row, roles[""]) if "" in roles else _messages(row, roles)
        others = {name: value for name, value in row.values.items() if name not in roles.values()}
        prompt_id = hashlib.sha256(json.dumps([text, seen[text]]).encode()).hexdigest()[:16]
        prompts.append(Prompt(prompt_id, text, others))
        seen[text] += 1
    return tuple(prompts)


def _choose_column(found: Sequence[str], column: str | None, place: str) -> str:
    if column is not None:
        if column in found:
            return column
        hint = f"Columns found: {_listed(found)}. Nearest: {nearest_names(column, found)}."
        raise InputError(place, f"no column {column}", hint)
    for group in PROMPT_COLUMNS:
        fitting = [name for name in found if name.lower() in group]
        if len(fitting) > 1:
            hint = "Each of them may be the prompt. Name the right one as prompt_column in the configuration."
            raise InputError(place, f"columns {', '.join(fitting)}", hint)
        if fitting:
            return fitting[0]
    known = ", ".join(name for group in PROMPT_COLUMNS for name in group)
    hint = f"None of them is a known prompt column ({known}). Name the right one as prompt_column in the configuration."
    raise InputError(place, f"columns {_listed(found)}", hint)


def _is_known(name: str) -> bool:
    return any(name.lower() in group for group in PROMPT_COLUMNS)


def _refuse_columns(columns: Sequence[str], found: Sequence[str], binary: Collection[str], place: str) -> None:
    for name in columns:
        if name not in found:
            hint = f"{place} has no such column. Nearest: {nearest_names(name, found)}."
            raise InputError("data.columns", name, hint)
        if name in binary:
            raise InputError("data.columns", name, f"The column of {place} has bytes; rewards get text and numbers.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


def _messages(row: PromptRow, roles: Mapping[str, str]) -> str:
    """Return a message per role as JSON, which is how a prompt of several messages is written."""
    empty = [column for role, column in roles.items() if role == "system" and not row.values.get(column)]
    contents = {role: _prompt_text(row, column) for role, column in roles.items() if column not in empty}
    return json.dumps([{"role": role, "content": text} for role, text in contents.items()], ensure_ascii=False)


def _prompt_text(row: PromptRow, column: str) -> str:
    value = row.values.get(column)
    if isinstance(value, list) and value and all(isinstance(each, dict) and "content" in each for each in value):
        # Messages, as conversational datasets have them.
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and has_visible_text(value):
        return value.strip()
    wanted = "Write the prompt there, or remove the row."
    if value is not None and not isinstance(value, str):
        wanted = "A prompt is text. Put it in quotes, or name the column with the text."
    elif value and value.strip():
        wanted = f"It has only characters that are not seen, such as zero-width ones. {wanted}"
    raise InputError(f"{row.place}, column {column}", value, wanted)
