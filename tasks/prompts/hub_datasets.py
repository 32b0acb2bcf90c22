"""Repositories of the package `datasets`, on the Hugging Face Hub or in a folder, opened as tables of prompts."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from grpo_core.errors import InputError, first_line
from tasks.prompts.files import file_ending, nearest_names
from tasks.prompts.formats import ENDINGS, ImageRow, PromptTable, has_bytes, plain_rows
from tasks.prompts.text_formats import PromptRow

SPLIT = "train"  # the split that is read when none is named
_IMAGE_ROWS = 16  # rows whose images are in memory at once

_NAME = re.compile(r"(?P<hub>hf://(datasets/)?)?(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class DatasetChoice:
    """Which part of a `datasets` repository is read, and how."""

    split: str | None = None  # name of the split, or a slice of one such as `train[:1000]`; None for `train`
    subset: str | None = None  # name of the configuration; None where there is only one
    revision: str | None = None  # branch, tag or commit of the Hub; None for `main`
    streaming: bool = False  # read over the network while rows are wanted, instead of downloading all files first


def names_dataset(source: str, choice: DatasetChoice) -> bool:
    """Return whether prompts are read with `datasets`; `owner/name` is a path if its folder exists here."""
    if choice != DatasetChoice():
        return True
    match = _NAME.fullmatch(source)
    if match is None or file_ending(source) in ENDINGS:
        return False
    return match["hub"] is not None or not Path(source).parent.exists()


def open_dataset(source: str, choice: DatasetChoice, limit: int | None) -> tuple[PromptTable, str | None]:
    """Open the rows of a dataset, of a stream so many; return them, and the commit of the Hub where it is known."""
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

    def read_images(columns: Collection[str]) -> Iterator[ImageRow]:
        wanted = [name for name in features if name in columns]
        with _one_message(source):
            # In Arrow's format no image is decoded.
            chosen = found.select_columns(wanted).with_format("arrow")
            records = chain.from_iterable(table.to_pylist() for table in chosen.iter(batch_size=_IMAGE_ROWS))
            for number, record in enumerate(islice(records, limit) if choice.streaming else records):
                values = {name: _with_bytes(value, source) for name, value in record.items()}
                # A row of a stream cannot be found again.
                yield ImageRow(values, None if choice.streaming else partial(_read_cell, found, source, number))

    return PromptTable(place, tuple(features), binary, read, read_images), commit


def _read_cell(found: Any, source: str, row: int, column: str) -> object:
    with _one_message(source):
        table = found.select_columns([column]).with_format("arrow")[row]
    return _with_bytes(table[column][0].as_py(), source)


def _with_bytes(value: object, source: str) -> object:
    """Read the images that `datasets` names by a path of its own; others stay as they are."""
    if isinstance(value, list):
        return [_with_bytes(each, source) for each in value]
    if not isinstance(value, dict) or value.get("bytes") is not None or not isinstance(value.get("path"), str):
        return value
    from datasets import config
    from huggingface_hub.constants import HF_HUB_CACHE

    # A dataset must not choose which other files are read.
    path = Path(value["path"]).resolve()
    allowed = (Path(source), Path(config.HF_DATASETS_CACHE), Path(HF_HUB_CACHE))
    if not any(path.is_relative_to(folder.resolve()) for folder in allowed):
        return value
    return {**value, "bytes": path.read_bytes()}


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
    from datasets.exceptions import DatasetsError

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
