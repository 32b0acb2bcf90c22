"""Name the images that are others than those that a run was trained with, from the rollouts that it has stored."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from grpo_core.messages import shown_question
from tasks.prompts.curriculum import PromptSet
from tasks.prompts.read import Prompt
from tasks.reports.text import one_line
from tasks.runs.layout import IMAGES, ROLLOUTS, STATES, iteration_folder
from tasks.runs.reader import RunReader, StoredArtifact
from tasks.storage.artifacts.store import ArtifactStore

_SHOWN = 5
"""Number of images that are named."""

_LETTERS = 60

Row = dict[str, Any]
"""What rollouts have of a prompt."""


def changed_images(store: ArtifactStore, sets: Sequence[PromptSet]) -> list[str]:
    """Say which images of these prompts changed, each with its prompt, among those that were sampled."""
    rows = _sampled(store)
    found = list(dict.fromkeys([*_changed_targets(rows, sets), *_changed_sources(rows, sets)]))
    more = [f"{len(found) - _SHOWN} more images changed"] if len(found) > _SHOWN else []
    return found[:_SHOWN] + more


def _sampled(store: ArtifactStore) -> list[Row]:
    """Read the prompts of all rollouts, each once; damaged ones are left out."""
    # Imported where it is used: most starts change nothing, and polars takes a while.
    import polars as pl

    from tasks.runs.samples import read_rollouts

    names = ("dataset", "prompt_id", "prompt", "sources", "target_sha256")
    reader, tables = RunReader(store), []
    folders = [each for number in reader.iterations() for each in reader.rounds(iteration_folder(number))]
    with store.reading(without=(IMAGES, STATES)) as read:
        for folder in folders:
            stored = reader.find(f"{folder}/{ROLLOUTS}")
            # Reading a damaged artifact would set it aside.
            if stored is not None and reader.verify(stored, only=_table_files(stored)):
                tables.append(read_rollouts([read(stored.reference)], names).unique(maintain_order=True))
    return pl.concat(tables, how="diagonal").unique(maintain_order=True).to_dicts() if tables else []


def _table_files(stored: StoredArtifact) -> list[str]:
    return [name for name in stored.manifest.files if not any(fnmatchcase(name, each) for each in (IMAGES, STATES))]


def _changed_targets(rows: Sequence[Row], sets: Sequence[PromptSet]) -> Iterator[str]:
    stored = {(row["dataset"], row["prompt_id"]): row.get("target_sha256") for row in rows}
    for known in sets:
        for prompt, target in zip(known.prompts, known.targets, strict=True):
            before = stored.get((known.name, prompt.prompt_id))
            if target is not None and before not in (None, target.sha256):
                yield f"the target {target.uri} of {_shown(prompt)} changed"


def _changed_sources(rows: Sequence[Row], sets: Sequence[PromptSet]) -> Iterator[str]:
    """Find prompts of the same text and columns with other images, whose prompt_id is therefore another."""
    for known in sets:
        own = [row for row in rows if row["dataset"] == known.name]
        ids, sampled = {prompt.prompt_id for prompt in known.prompts}, {row["prompt_id"] for row in own}
        gone: dict[str, list[Row]] = {}
        for row in own:
            if row["prompt_id"] not in ids:
                gone.setdefault(row["prompt"], []).append(row)
        new: dict[str, list[Prompt]] = {}
        for prompt in known.prompts:
            if prompt.text in gone and prompt.prompt_id not in sampled:
                new.setdefault(prompt.text, []).append(prompt)
        for text, prompts in new.items():
            # Among several of one text, those that were never sampled cannot be told from those that changed.
            if len(prompts) == len(gone[text]):
                before = {digest for row in gone[text] for digest in row.get("sources") or ()}
                for prompt in prompts:
                    for image in prompt.sources:
                        if image.digest not in before:
                            yield f"the image {image.name} of {_shown(prompt)} changed"


def _shown(prompt: Prompt) -> str:
    return f"the prompt {one_line(shown_question(prompt.text), _LETTERS)!r}"
