"""Prompt files and `datasets` repositories, read into prompts with stable names."""

import hashlib
import json
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

from grpo_core.errors import InputError
from grpo_core.rollouts.messages import caption_of, is_conversation, read_messages, refuse_messages, write_messages
from grpo_core.rollouts.streams import has_visible_text
from tasks.prompts.files import file_ending, find_files, nearest_names
from tasks.prompts.formats import ENDINGS, ImageRow, PromptTable, open_table
from tasks.prompts.hub_datasets import DatasetChoice, names_dataset, open_dataset
from tasks.prompts.source_images import (
    PromptWithSources,
    SourceColumns,
    SourceReference,
    choose_source_columns,
    read_source_images,
)
from tasks.prompts.text_formats import PromptRow, convert_numbers

PROMPT_COLUMNS = (("prompt",), ("prompt_en",), ("prompt_raw",), ("prompts",), ("instruction",), ("caption", "text"))
"""Names of the prompt column, in upper or lower case; the first group that a file has one name of is used.

`text` comes last, because beside a prompt it is the text to render. A file with several names of the first group that
it has, such as a caption and a text or a prompt and a Prompt, does not say which is the prompt, and is refused.
"""

ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "final_answer", "expected_answer")
"""Columns of CSV and TSV, in upper or lower case, that stay text where every cell is a number."""

LONG_PROMPT = 4000  # characters from which on a prompt is reported: about a thousand tokens of English

_LISTED, _SHOWN_LETTERS = 20, 200
_ARGUMENTS = "chat_template_kwargs"
_PRINTED_MESSAGES = re.compile(r"\s*\[\{'(role|content)'")


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set."""

    # 16 hexadecimal digits from the text, the digests of its images and its number of earlier occurrences in the set;
    # independent of file format, path and other columns.
    prompt_id: str
    # The prompt as it stands in its row, messages as :mod:`grpo_core.rollouts.messages` writes them; of one with
    # images, with a mark or a block for each or none.
    text: str
    # The other columns that go along, as plain JSON values; an empty cell of a CSV or TSV file is None.
    columns: Mapping[str, object] = field(hash=False)
    sources: tuple[SourceReference, ...] = ()  # its images, in their order

    @property
    def content_digest(self) -> str:
        """The sha256 of the text and its images; the same for all rows with them."""
        described = [self.text, *(each.digest for each in self.sources)]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()


@dataclass(frozen=True)
class PromptFile:
    """What a prompt file, or a folder of them, contains."""

    folder: str  # folder of the file or files, spelled like the source; empty is the working directory
    column: str  # the column of the prompts, of messages several; `prompt` for plain text
    prompts: tuple[Prompt, ...]  # in the order of the file; of a folder, in the natural order of its files' names
    commit: str | None = None  # of a dataset of the Hub: the commit that was read; None where it is not known
    source_columns: tuple[str, ...] = ()  # the columns with the images in prompts


def read_prompts(
    source: str | Path,
    *,
    column: str | Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    also: Collection[str] = (),
    limit: int | None = None,
    choice: DatasetChoice | None = None,
    images: SourceColumns | None = None,
    captions: bool = False,
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
        images: where the images in prompts are, which go along with the prompt and in no column; None: prompts are
            texts, and columns of images are like any other.
        captions: whether a prompt must be one text, as image generators read it; of messages it is the user's.

    Raises:
        InputError: the file or dataset cannot be read, is malformed, or has no prompts; a prompt is missing, neither
            text nor messages, or invisible; a column is unknown, ambiguous or binary; or an image cannot be used.
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
    of_images = () if images is None else choose_source_columns(found, images, place)
    _refuse_columns(columns or (), found, binary, of_images, place)
    wanted = set(found) if columns is None else {*columns, *also}
    rows = _read_rows(tables, chosen, (wanted & set(found)) - binary - set(of_images))
    if not typed:
        convert_numbers(rows, text_columns=lambda name: name in chosen or _is_text(name))
    if not rows:
        raise InputError(place, "no prompts", "Put at least one prompt into the file.")
    rows = rows[:limit]
    texts = _Reader(roles, typed, images is not None).texts(rows)
    if images is None:
        contents = [PromptWithSources(text, ()) for text in texts]
    else:
        read = chain.from_iterable(table.read_images(of_images) for table in tables)
        cells = read if of_images else repeat(ImageRow({}))
        contents = read_source_images(rows, texts, cells, images, folder)
    if captions:
        contents = _as_captions(rows, contents, roles.get("", ""))
    return PromptFile(folder, ", ".join(roles.values()), _named(rows, contents, roles), commit, of_images)


def _read_rows(tables: Sequence[PromptTable], chosen: Collection[str], along: Collection[str]) -> list[PromptRow]:
    for table in tables:
        for name in sorted(set(chosen) - set(table.columns)) if table.columns else ():
            hint = f"Other files of the folder have it; this one has {_listed(table.columns)}."
            raise InputError(table.place, f"no column {name}", hint)
    return [row for table in tables for row in table.read({*chosen, *along})]


def _named(
    rows: Iterable[PromptRow], contents: Sequence[PromptWithSources], roles: Mapping[str, str]
) -> tuple[Prompt, ...]:
    names = name_prompts((text, *(each.digest for each in sources)) for text, sources in contents)
    prompts = []
    for row, (text, sources), prompt_id in zip(rows, contents, names, strict=True):
        others = {name: value for name, value in row.values.items() if name not in roles.values()}
        prompts.append(Prompt(prompt_id, text, others, sources))
    return tuple(prompts)


def name_prompts(contents: Iterable[Sequence[str]]) -> list[str]:
    """Return the stable name of each prompt of a set, given its text and the digests of its images."""
    seen: Counter[tuple[str, ...]] = Counter()
    names = []
    for content in map(tuple, contents):
        described = [content[0], seen[content], *content[1:]]
        names.append(hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16])
        seen[content] += 1
    return names


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


def _is_text(name: str) -> bool:
    return name.lower() in ANSWER_COLUMNS or any(name.lower() in group for group in PROMPT_COLUMNS)


def _refuse_columns(
    columns: Sequence[str], found: Sequence[str], binary: Collection[str], images: Collection[str], place: str
) -> None:
    for name in columns:
        if name in images:
            hint = "It has the images in the prompts, which rewards get as source_images: leave it out here."
            raise InputError("data.columns", name, hint)
        if name not in found:
            hint = f"{place} has no such column. Nearest: {nearest_names(name, found)}."
            raise InputError("data.columns", name, hint)
        if name in binary:
            raise InputError("data.columns", name, f"The column of {place} has bytes; rewards get text and numbers.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


class _Reader(NamedTuple):
    """Reads the prompt of a row, by the column of each role, or of the one prompt."""

    roles: Mapping[str, str]
    typed: bool
    images: bool

    def texts(self, rows: Sequence[PromptRow]) -> list[str]:
        """Return the prompt of each row; plain texts and messages are not mixed, as no table could have them."""
        if "" not in self.roles:
            return [self._by_roles(row) for row in rows]
        found, conversational = [], None
        for row in rows:
            text, has_messages = self._prompt(row, self.roles[""])
            if conversational not in (None, has_messages):
                hint = "Other rows have messages." if conversational else "Other rows are texts."
                raise InputError(_place(row, self.roles[""]), _shown(text), f"{hint} Write all prompts of a set alike.")
            found.append(text)
            conversational = has_messages
        return found

    def _by_roles(self, row: PromptRow) -> str:
        """Return a message per role; without the system's where that is empty."""
        empty = [column for role, column in self.roles.items() if role == "system" and not row.values.get(column)]
        contents = {role: _text(row, column) for role, column in self.roles.items() if column not in empty}
        return write_messages([{"role": role, "content": text} for role, text in contents.items()])

    def _prompt(self, row: PromptRow, column: str) -> tuple[str, bool]:
        """Return the text of a prompt, and whether it is a conversation."""
        value, place = row.values.get(column), _place(row, column)
        if isinstance(value, str) and not self.typed:
            value = read_messages(value.strip()) or value
            if isinstance(value, str) and _PRINTED_MESSAGES.match(value):
                hint = "Python printed these messages. Write them as JSON, or the file as JSONL or Parquet."
                raise InputError(place, _shown(value), hint)
        if not isinstance(value, list):
            text = _text(row, column)
            if read_messages(text) is not None:
                hint = "These messages are a text, which a model would read as it is. Write them as a list, unquoted."
                raise InputError(place, _shown(text), hint)
            return text, False
        if not is_conversation(value):
            names = value[0].keys() if value and isinstance(value[0], dict) else ()
            renamed = (
                "; rename from to role (human: user, gpt: assistant) and value to content" if "from" in names else ""
            )
            raise InputError(
                place, _shown(value), f"A prompt is a text, or a list of messages with role and content{renamed}."
            )
        refuse_messages(value, place, images=self.images)
        given = row.values.get(_ARGUMENTS)
        # A table gives every row the same keys.
        if any(each is not None for each in given.values()) if isinstance(given, dict) else given:
            hint = "Chat templates get no arguments of a row, as in TRL's GRPOTrainer. Leave it out of data.columns."
            raise InputError(_place(row, _ARGUMENTS), given, hint)
        return write_messages(value), True


def _shown(value: object) -> object:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}..."


def _place(row: PromptRow, column: str) -> str:
    return f"{row.place}, column {column}"


def _text(row: PromptRow, column: str) -> str:
    """Return a text as it stands in its row, with the white space at its ends."""
    value = row.values.get(column)
    if isinstance(value, str) and has_visible_text(value):
        return value
    wanted = "Write the prompt there, or remove the row."
    if value is not None and not isinstance(value, str):
        wanted = "A prompt is text. Put it in quotes, or name the column with the text."
    elif value and value.strip():
        wanted = f"It has only characters that are not seen, such as zero-width ones. {wanted}"
    raise InputError(_place(row, column), value, wanted)


def _as_captions(
    rows: Sequence[PromptRow], contents: Sequence[PromptWithSources], column: str
) -> list[PromptWithSources]:
    found = []
    for row, content in zip(rows, contents, strict=True):
        text = caption_of(content.text, _place(row, column))
        if not has_visible_text(text):
            raise InputError(_place(row, column), content.text, "Write the prompt there, or remove the row.")
        found.append(content._replace(text=text))
    return found
