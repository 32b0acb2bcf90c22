"""A stored evaluation as a card has it: its prompts, the score of every sample, means and intervals over prompts."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl

from grpo_core.errors import InputError
from tasks.prompts.files import read_input_file
from tasks.prompts.targets import find_target
from tasks.reports.compared_runs import interval
from tasks.runs.layout import IMAGES, SCORES_FILE, STATES, StoredEvaluation
from tasks.runs.samples import read_rollouts, tables_of, with_advantages
from tasks.runs.sources import digests_in, read_sources
from tasks.storage.artifacts.store import ArtifactStore, Read
from tasks.storage.parquet import scan_tables
from tasks.verification.evaluation_card import CardPrompt, CardScore

_COLUMNS = (
    *("sample_id", "group_id", "prompt_id", "dataset", "prompt", "columns"),
    *("sources", "target_uri", "target_sha256", "width", "height"),
)


class MeasuredEvaluation:
    """A stored evaluation as a card has it: read once, every file verified."""

    def __init__(self, store: ArtifactStore, done: StoredEvaluation) -> None:
        self._store = store
        with store.reading(without=(IMAGES, STATES)) as read:
            rows = read_rollouts([read(done.rollouts)], _COLUMNS)
            rows = with_advantages(rows, tables_of(read(done.advantages)))
            # Prompts of one size are sampled together; their ids are in the order of the file.
            ids = pl.col("group_id")
            self._rows = rows.sort(ids.str.len_chars(), ids, maintain_order=True)
            self.scores = tuple(self._scores(read, done))

    @property
    def samples(self) -> tuple[str, ...]:
        """The ids of the samples, in the order of the prompts."""
        return tuple(self._rows["sample_id"])

    def _scores(self, read: Read, done: StoredEvaluation) -> Iterator[CardScore]:
        mean = done.advantages.metrics.get("reward")
        yield self._score("reward", "mix", self._rows["reward"].to_list(), mean)
        tables = [("reward", each) for each in done.rewards.items()]
        for role, (label, table) in (*tables, *(("guardrail", each) for each in done.guardrails.items())):
            scored = scan_tables([read(table) / SCORES_FILE]).select("sample_id", "value", "provenance").collect()
            joined = self._rows.select("sample_id").join(scored, on="sample_id", how="left", maintain_order="left")
            origin = next((each for each in joined["provenance"] if each is not None), None)
            score = self._score(label, role, joined["value"].to_list(), table.metrics.get(f"rewards/{label}/mean"))
            yield score.model_copy(update={"provenance": None if origin is None else json.loads(origin)})

    def _score(self, label: str, role: Any, values: Sequence[float | None], mean: float | None) -> CardScore:
        low, high = interval_over(values, self._rows["group_id"].to_list()) or (None, None)
        return CardScore(label=label, role=role, mean=mean, low=low, high=high, values=tuple(values))

    def prompts(self) -> tuple[CardPrompt, ...]:
        """Return the prompts in the order of their files."""
        groups = self._rows.unique("group_id", keep="first", maintain_order=True)
        return tuple(
            CardPrompt(
                prompt_id=row["prompt_id"],
                dataset=row["dataset"],
                prompt=row["prompt"],
                columns=json.loads(row["columns"]),
                sources=tuple(row.get("sources") or ()),
                target=row.get("target_sha256"),
                width=row.get("width"),
                height=row.get("height"),
            )
            for row in groups.iter_rows(named=True)
        )

    def write_images(self, folder: Path, folders: Sequence[str]) -> tuple[str, ...]:
        """Write the images of the prompts as files named by their sha256, and return those that are not found.

        Args:
            folder: is made if there are any.
            folders: where target images may be read beside the working directory and the storage root.
        """
        for digest, where in digests_in(self._rows).items():
            _write(folder, read_sources(self._store, {digest: where})[digest].content, digest)
        missing = []
        targets = (
            self._rows.filter(pl.col("target_sha256").is_not_null()) if "target_uri" in self._rows.columns else None
        )
        named = {} if targets is None else dict(targets.select("target_sha256", "target_uri").iter_rows())
        for digest, uri in named.items():
            place = find_target(uri, [self._store], folders)
            try:
                content = None if place is None else read_input_file(place, place="target image")
            except InputError:
                content = None
            if content is None or not _write(folder, content, digest):
                missing.append(digest)
        return tuple(missing)


def _write(folder: Path, content: bytes, digest: str) -> bool:
    """Write a file under its digest; False if it has another."""
    if hashlib.sha256(content).hexdigest() != digest:
        return False
    folder.mkdir(exist_ok=True)
    (folder / digest).write_bytes(content)
    return True


def interval_over(values: Sequence[float | None], groups: Sequence[str]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean over prompts of samples' scores; None with fewer than two prompts."""
    by_group: dict[str, list[float]] = {}
    for group, value in zip(groups, values, strict=True):
        if value is not None:
            by_group.setdefault(group, []).append(value)
    return interval([fmean(each) for each in by_group.values()])
