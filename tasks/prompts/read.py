"""Prompt files, read into prompts with stable names."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_core.errors import InputError
from tasks.prompts.files import nearest_names, read_input_file
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
        source: a plain path (``~`` is the home folder) or an fsspec URL.
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
        prompts.append(Prompt(_prompt_id(text, seen[text]), text, others))
        seen[text] += 1
    return tuple(prompts)


def _prompt_id(text: str, earlier: int) -> str:
    return hashlib.sha256(json.dumps([text, earlier]).encode()).hexdigest()[:16]


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
