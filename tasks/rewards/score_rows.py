"""Score stored rows, here or in child processes of one thread each, which keep the reward's model loaded.

Imports little, because scoring processes start with this module.
"""

import functools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
from PIL import Image

from configs.scoring import RewardSection
from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import Reward, score_samples
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch
from grpo_core.rollouts.images import decode_stored
from tasks.execution.child_main import child_command
from tasks.execution.child_process import ChildProcesses
from tasks.execution.errors import LostStageError
from tasks.execution.resources import resource
from tasks.process import map_in_threads
from tasks.progress import listener
from tasks.prompts.targets import TargetReference, find_target, load_target
from tasks.runs.layout import IMAGES, PARTS
from tasks.runs.sources import read_sources
from tasks.storage.artifacts.store import ArtifactStore

Row = Mapping[str, Any]

SCORES = ("sample_id", "value", "raw", "failure", "seconds")  # columns of a score

LOGGED_BY, EXTRA = "logged", "extra"
"""Beside them in a row: metrics that the call which scored the sample reported, and columns of the sample, by name."""

_READ = ("sample_id", "group_id", "dataset", "prompt", "columns")
_READ_OF_IMAGES = ("target_uri", "target_sha256", "defect")
_READ_OF_TEXTS = ("completion",)
_READ_AT_ONCE = 32
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_PRUNED = (
    "It was removed by `grpo prune`, so no reward can score the sample any more. Leave out the rewards and guardrails "
    "that have no stored scores of these samples; the others still work."
)


TARGET_HINT = (
    "This target image of a stored row is neither in the working directory nor beside the storage root, nor in a "
    "folder of targets that the run's configuration names and that you know. Start `grpo` where the run was started, "
    "or agree to its data.targets with --trust-code."
)


def batches_for(
    reward: Reward,
    section: RewardSection,
    source: Path,
    names: frozenset[str],
    store: ArtifactStore,
    run: str,
    folders: Sequence[str] = (),
) -> Iterator[list[Row]]:
    """Yield the wanted samples of a run in order, siblings together; all batches but the last have the section's size.

    Rows have the tokens, the images in prompts and the targets that the reward needs; InputError for a target that may
    not be read (`find_target`).
    """
    needs = reward.load_needs()
    more = [name for name, needed in (("token_ids", needs.tokens is not None), ("sources", needs.sources)) if needed]

    @functools.cache
    def find(uri: str) -> str:
        if (found := find_target(uri, [store], folders)) is None:
            raise InputError("data.targets", uri, TARGET_HINT)
        return found

    def located(row: Row) -> Row:
        uri = row.get("target_uri")
        return row if uri is None else {**row, "target_uri": find(uri) if needs.target else None}

    batches = _cut(map(located, _rows_of(source, ["completion_start", *more], names)), section.batch_size)
    return (_with_sources(batch, store, run) for batch in batches) if needs.sources else batches


def _cut(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """Cut rows into batches of at least `size`, siblings together."""
    waiting: list[Row] = []
    for row in rows:
        if len(waiting) >= size and row["group_id"] != waiting[-1]["group_id"]:
            yield waiting
            waiting = []
        waiting.append(row)
    if waiting:
        yield waiting


def _with_sources(rows: list[Row], store: ArtifactStore, run: str) -> list[Row]:
    """Put the images in the place of their digests; each is read once per batch."""
    named = {digest: f"sample {row['sample_id']}" for row in reversed(rows) for digest in row.get("sources") or ()}
    found = read_sources(store, named, [run])
    return [{**row, "sources": [found[digest] for digest in row.get("sources") or ()]} for row in rows]


def _rows_of(source: Path, more: Sequence[str], wanted: frozenset[str]) -> Iterator[Row]:
    image_files = sorted(source.glob(IMAGES))
    images = chain.from_iterable(_records(path, ("sample_id", "image"), wanted) for path in image_files)
    for path in sorted(source.glob(PARTS)):
        known = pq.read_schema(path).names
        of_images = "defect" in known
        # Images can be made without tokens.
        kept = [name for name in more if name in known]
        for row in _records(path, [*_READ, *(_READ_OF_IMAGES if of_images else _READ_OF_TEXTS), *kept], wanted):
            if of_images:
                # They are stored in the order of the rows; there are none once they were pruned.
                stored = next(images, {"sample_id": row["sample_id"], "image": None})
                if stored["sample_id"] != row["sample_id"]:
                    raise ValueError(f"{path.name}: the image of {row['sample_id']} is not in its place")
                row["image"] = stored["image"]
            yield row


def _records(path: Path, columns: Sequence[str], wanted: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Read the rows of the wanted samples; row groups without any are left out."""
    chosen = ds.field("sample_id").isin(sorted(wanted))
    table = ds.dataset(path, format="parquet")
    for record in table.to_batches(list(columns), chosen, _READ_AT_ONCE, 1, 1, use_threads=False):
        yield from record.to_pylist()


def score_rows(reward: Reward, section: RewardSection, rows: Sequence[Row]) -> list[Row]:
    """Score the rows that the reward is meant for, with the columns of SCORES; the others get NOT_APPLICABLE."""
    begun = time.perf_counter()
    # Siblings share their prompt.
    prompts = {(row["dataset"], row["columns"]) for row in rows}
    meant = {(dataset, columns) for dataset, columns in prompts if section.scores_prompt(dataset, json.loads(columns))}
    wanted = [index for index, row in enumerate(rows) if (row["dataset"], row["columns"]) in meant]
    chosen = [rows[index] for index in wanted]
    # Parsed for each sample: a reward function may change what it is given.
    batch = _scoring_batch(chosen, [json.loads(row["columns"]) for row in chosen])
    # A broken image gets the lowest value of every reward that applies to it.
    scores = [
        Score(0.0, None) if row.get("defect") is not None and score != NOT_APPLICABLE else score
        for score, row in zip(_scored(reward, section, batch), chosen, strict=True)
    ]
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
            LOGGED_BY: score.logged,
            EXTRA: score.extra,
        }
        for index, (sample_id, score) in enumerate(cells)
    ]


def _scored(reward: Reward, section: RewardSection, batch: ScoringBatch) -> list[Score]:
    """Score a batch; InputError with the settings to change where the memory of a GPU is too small."""
    try:
        return score_samples(reward, batch)
    except RuntimeError as error:
        # Only a network of torch runs out of a GPU's memory; other rewards do not import it.
        import torch

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        message = str(error).partition(". ")[0]
        hint = f"The GPU's memory is too small for this reward ({message}). Lower settings.batch_size of the reward, "
        hint += "or compute it with settings.device cpu, or on another GPU."
        raise InputError(f"rewards.{section.label}", len(batch), hint) from error


def _scoring_batch(rows: Sequence[Row], others: Sequence[Mapping[str, Any]]) -> ScoringBatch:
    names = sorted({name for columns in others for name in columns})
    outputs = _images(rows) if rows and "image" in rows[0] else {"completions": [row["completion"] for row in rows]}
    return ScoringBatch(
        sample_ids=[row["sample_id"] for row in rows],
        prompts=[row["prompt"] for row in rows],
        columns={name: [columns.get(name) for columns in others] for name in names},
        group_ids=[row["group_id"] for row in rows],
        token_ids=[row["token_ids"] for row in rows] if rows and "token_ids" in rows[0] else (),
        source_images=_source_images(rows),
        starts=[row["completion_start"] for row in rows] if rows and "completion_start" in rows[0] else (),
        **outputs,
    )


def _source_images(rows: Sequence[Row]) -> list[list[Image.Image]]:
    """Decode the images in the rows' prompts, each once; empty if no prompt has any."""
    if not any(row.get("sources") for row in rows):
        return []
    decoded = {each.digest: each.open() for each in {each for row in rows for each in row["sources"]}}
    return [[decoded[each.digest] for each in row["sources"]] for row in rows]


def _images(rows: Sequence[Row]) -> dict[str, Any]:
    for row in rows:
        if row["image"] is None:
            raise InputError(f"sample {row['sample_id']}", "no image", _PRUNED)
    named = [(row["target_uri"], row["target_sha256"]) for row in rows if row["target_uri"] is not None]
    references = [TargetReference(*each) for each in dict.fromkeys(named)]
    targets = {each.uri: image for each, image in zip(references, map_in_threads(load_target, references), strict=True)}
    return {
        # Decoded here, so that its time counts for the batch.
        "images": [decode_stored(row["image"]["bytes"], row["sample_id"]) for row in rows],
        "targets": [targets.get(row["target_uri"]) for row in rows],
    }


def score_in_processes(
    section: RewardSection,
    source: Path,
    names: frozenset[str],
    store: ArtifactStore,
    run: str,
    folders: Sequence[str] = (),
) -> Iterator[list[Row]]:
    """Score samples in the section's own processes, which read them; results come in order, and errors as raised."""
    whose = {"source": str(source), "store": [store.root, store.run], "run": run, "folders": list(folders)}
    rows = chain.from_iterable(_records(path, ("sample_id", "group_id"), names) for path in sorted(source.glob(PARTS)))
    waiting: deque[Future[list[Row]]] = deque()
    # Taken here: each thread's copy of the context would make its own.
    children = resource(ChildProcesses)
    threads = ThreadPoolExecutor(section.processes, thread_name_prefix="scoring")
    try:
        for batch in _cut(rows, section.batch_size):
            payload = {**whose, "names": [row["sample_id"] for row in batch]}
            waiting.append(threads.submit(copy_context().run, _score, children, section, payload))
            if len(waiting) >= 2 * section.processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(wait=True, cancel_futures=True)


def _score(children: ChildProcesses, section: RewardSection, payload: Mapping[str, Any]) -> list[Row]:
    label, described = f"score {section.label}", section.model_dump_json()
    with children.borrow(described, label, child_command("scoring"), _ONE_THREAD) as process:
        for attempt in (1, 2):
            try:
                rows: list[Row] = process.request(label, {**payload, "section": described}, None, listener())
                return rows
            except LostStageError as error:
                if attempt == 2:
                    hint = "A scoring process died twice at the same samples; lower it, or check the memory."
                    raise InputError(f"rewards.{section.label}.processes", section.processes, hint) from error
    raise AssertionError("the second attempt returns or raises")


def scoring_handler() -> Callable[[dict[str, Any]], list[Row]]:
    """Set this process to one thread, and return the function that scores the samples of the parent's batches."""
    # torch may already be imported, so its environment variables come too late.
    import torch

    torch.set_num_threads(1)

    def score(payload: dict[str, Any]) -> list[Row]:
        section, reward = RewardSection.model_validate_json(payload["section"]), _reward(payload["section"])
        whose = Path(payload["source"]), frozenset(payload["names"]), ArtifactStore(*payload["store"])
        batches = batches_for(reward, section, *whose, payload["run"], payload["folders"])
        return score_rows(reward, section, [row for batch in batches for row in batch])

    return score


@functools.lru_cache(maxsize=1)
def _reward(section: str) -> Reward:
    described = RewardSection.model_validate_json(section)
    return build_reward(described.reward, described.settings)
