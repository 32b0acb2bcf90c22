"""Score stored rows. Imports little, because scoring processes start with this module."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from configs.training import RewardSection
from grpo_core.errors import InputError
from grpo_core.rewards.images import decode_stored
from grpo_core.rewards.reward import NOT_APPLICABLE, Reward, Score, ScoringBatch, score_samples
from tasks.prompts.targets import TargetReference, load_target
from tasks.runs.layout import IMAGES, PARTS

Row = Mapping[str, Any]

SCORES = ("sample_id", "value", "raw", "failure", "seconds")
"""Columns of a score."""

_READ = ("sample_id", "group_id", "dataset", "prompt", "columns")
_READ_OF_TOKENS = ("token_ids",)
_READ_OF_IMAGES = ("target_uri", "target_sha256", "defect")
_READ_OF_TEXTS = ("completion",)
_READ_AT_ONCE = 32

_PRUNED = (
    "It was removed by `grpo prune`, so no reward can score the sample any more. Leave out the rewards and guardrails "
    "that have no stored scores of these samples; the others still work."
)


def batches_of(source: Path, size: int, wanted: frozenset[str], *, with_tokens: bool) -> Iterator[list[Row]]:
    """Yield batches of the wanted samples in order, siblings together; all but the last have at least `size`."""
    waiting: list[Row] = []
    for row in _rows_of(source, _READ_OF_TOKENS if with_tokens else ()):
        if row["sample_id"] not in wanted:
            continue
        if len(waiting) >= size and row["group_id"] != waiting[-1]["group_id"]:
            yield waiting
            waiting = []
        waiting.append(row)
    if waiting:
        yield waiting


def _rows_of(source: Path, more: tuple[str, ...]) -> Iterator[Row]:
    images = chain.from_iterable(_records(path, ("sample_id", "image")) for path in sorted(source.glob(IMAGES)))
    for path in sorted(source.glob(PARTS)):
        known = pq.read_schema(path).names
        of_images = "defect" in known
        # Images can be made without tokens.
        kept = [name for name in more if name in known]
        for row in _records(path, [*_READ, *(_READ_OF_IMAGES if of_images else _READ_OF_TEXTS), *kept]):
            if of_images:
                # They are stored in the order of the rows; there are none once they were pruned.
                stored = next(images, {"sample_id": row["sample_id"], "image": None})
                if stored["sample_id"] != row["sample_id"]:
                    raise ValueError(f"{path.name}: the image of {row['sample_id']} is not in its place")
                row["image"] = stored["image"]
            yield row


def _records(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for record in pq.ParquetFile(path).iter_batches(_READ_AT_ONCE, columns=list(columns)):
        yield from record.to_pylist()


def score_rows(reward: Reward, section: RewardSection, rows: Sequence[Row]) -> list[Row]:
    """Score the rows that the reward is meant for; the others get NOT_APPLICABLE.

    Returns:
        One row per row, with the columns of :data:`SCORES`; `seconds` is an equal share of the batch's time.
    """
    begun = time.perf_counter()
    # Siblings share their prompt.
    prompts = {(row["dataset"], row["columns"]) for row in rows}
    meant = {(dataset, columns) for dataset, columns in prompts if section.scores_prompt(dataset, json.loads(columns))}
    wanted = [index for index, row in enumerate(rows) if (row["dataset"], row["columns"]) in meant]
    chosen = [rows[index] for index in wanted]
    # Parsed for each sample: a reward function may change what it is given.
    batch = _scoring_batch(chosen, [json.loads(row["columns"]) for row in chosen])
    scores = [_floored(score, row) for score, row in zip(score_samples(reward, batch), chosen, strict=True)]
    share = (time.perf_counter() - begun) / max(1, len(wanted))
    by_index = dict(zip(wanted, scores, strict=True))
    cells = [(row["sample_id"], by_index.get(index, NOT_APPLICABLE)) for index, row in enumerate(rows)]
    return [
        {
            "sample_id": sample_id,
            "value": score.value,
            "raw": score.raw,
            "failure": score.failure,
            "seconds": share if index in by_index else 0.0,
        }
        for index, (sample_id, score) in enumerate(cells)
    ]


def _floored(score: Score, row: Row) -> Score:
    """Give a broken image the lowest value of every reward that applies to it."""
    broken = row.get("defect") is not None and score != NOT_APPLICABLE
    return Score(0.0, None) if broken else score


def _scoring_batch(rows: Sequence[Row], others: Sequence[Mapping[str, Any]]) -> ScoringBatch:
    names = sorted({name for columns in others for name in columns})
    outputs = _images(rows) if rows and "image" in rows[0] else {"completions": [row["completion"] for row in rows]}
    return ScoringBatch(
        sample_ids=[row["sample_id"] for row in rows],
        prompts=[row["prompt"] for row in rows],
        columns={name: [columns.get(name) for columns in others] for name in names},
        group_ids=[row["group_id"] for row in rows],
        token_ids=[row["token_ids"] for row in rows] if rows and "token_ids" in rows[0] else (),
        **outputs,
    )


def _images(rows: Sequence[Row]) -> dict[str, Any]:
    targets: dict[str, Image.Image] = {}
    for row in rows:
        if row["image"] is None:
            raise InputError(f"sample {row['sample_id']}", "no image", _PRUNED)
        uri = row["target_uri"]
        if uri is not None and uri not in targets:
            targets[uri] = load_target(TargetReference(uri, row["target_sha256"]))
    return {
        # Decoded here, so that its time counts for the batch.
        "images": [decode_stored(row["image"]["bytes"], row["sample_id"]) for row in rows],
        "targets": [targets.get(row["target_uri"]) for row in rows],
    }
