"""The streams in stored rollouts, tokens and denoising steps: their columns, rows for training, and metrics.

The latents of noisy steps, called states, are files of their own in the artifact of rollouts, since they are as large
as the images and only an update needs them: safetensors, a tensor per sample, which it maps into memory. A window of
two steps at 1024 x 1024 pixels is 1.5 MiB per sample in 16 bits.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from jaxtyping import Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from grpo_core.rollouts.actions import DenoisingBatch, Sources, TokenBatch
from grpo_core.rollouts.ragged import Ragged, RaggedActions, RaggedTokens
from grpo_core.rollouts.records import RolloutGroup, SampledTokens
from grpo_core.rollouts.streams import ImageSize, Stream
from tasks.metrics import COMPLETION_LENGTH, DRAFTS, TOKENS
from tasks.runs.layout import IMAGES, PARTS, STATES, STATES_FILE
from tasks.storage.lists import lists_of, ragged, unpadded
from tasks.storage.parquet import DIGESTS, scan_tables


def token_columns(group: RolloutGroup) -> dict[str, Sequence[Any]]:
    """Return the columns of a group's tokens, one row per sample."""
    sampled = _sampled_tokens(group)
    tokens, compared = sampled.actions, group.compared.get("tokens")
    scored, reference = (None, None) if compared is None else (compared.scored, compared.reference)
    return {
        "token_ids": unpadded(tokens.token_ids, tokens.loss_mask),
        "rollout_logprobs": unpadded(sampled.rollout_logprobs, tokens.loss_mask),
        **{
            name: [None] * len(tokens) if values is None else unpadded(values, tokens.loss_mask)
            for name, values in (("scored_logprobs", scored), ("ref_logprobs", reference))
        },
        "loss_mask": unpadded(tokens.loss_mask, tokens.loss_mask),
        **_support_columns(tokens),
        "length": tokens.loss_mask.sum(-1).tolist(),
        "prompt_length": sampled.prompt_lengths.tolist(),
        "max_length": [sampled.max_length] * len(tokens),
        "finished": sampled.finished.tolist(),
    }


def _sampled_tokens(group: RolloutGroup) -> SampledTokens:
    sampled = group.streams["tokens"]
    assert isinstance(sampled, SampledTokens), "a stream has its own kind of actions"
    return sampled


def _support_columns(tokens: TokenBatch) -> dict[str, Sequence[Any]]:
    if tokens.support is None:
        return {"support_ids": [None] * len(tokens), "support_counts": [None] * len(tokens)}
    return {
        "support_ids": lists_of(tokens.support.ids, tokens.support.counts.sum(-1)),
        "support_counts": unpadded(tokens.support.counts, tokens.loss_mask),
    }


def sample_files(folders: Sequence[Path]) -> list[Path]:
    """Return the files with the rows of the samples, in the order in which the rows are stored."""
    return [path for folder in folders for path in sorted(folder.glob(PARTS))]


def read_tokens(
    table: pl.DataFrame, folders: Sequence[Path], scratch: Path, max_length: int, sources: Sources | None = None
) -> RaggedActions:
    """Return the stored tokens of a table's rows, in the order in which they are stored.

    The tokens of all rows are in memory at once, 9 bytes each, without padding. The ids that a truncated sampler
    could choose, up to thousands for each token, stay on disk, and microbatches read their own, from a file in
    `scratch`. `sources` has the images in each row's prompt; None: no prompt has any. ValueError for rows of several
    temperatures, or with and without a stored support.
    """
    ids = _mapped_support_ids(sample_files(folders), table["sample_id"], scratch)
    return RaggedActions(
        actions=_read_ragged_tokens(table, ids, sources),
        rollout_logprobs=ragged(table["rollout_logprobs"]),
        finished=table["finished"].to_torch(),
        max_length=max_length,
        # It decides what a pass computes, and no value.
        prompt_lengths=table["prompt_length"].fill_null(0).cast(pl.Int64).to_torch(),
    )


def _read_ragged_tokens(table: pl.DataFrame, support_ids: Tensor | None, sources: Sources | None) -> RaggedTokens:
    """Return the stored tokens of a table's rows; ValueError for several temperatures, or some without a support."""
    temperatures = table["temperature"].unique().to_list()
    if len(temperatures) > 1:
        raise ValueError(f"the rows were sampled at several temperatures, {sorted(temperatures)}; update on each apart")
    counts = None if support_ids is None else _support_counts(table)
    return RaggedTokens(
        prompts=tuple(table["prompt"]),
        token_ids=ragged(table["token_ids"]),
        loss_mask=ragged(table["loss_mask"]),
        temperature=temperatures[0] if temperatures else 1.0,
        support_ids=None if counts is None else support_ids,
        support_counts=counts,
        sizes=tuple(map(ImageSize, table["width"], table["height"])) if "width" in table.columns else None,
        sources=sources,
    )


def read_token_batch(table: pl.DataFrame, sources: Sources | None = None) -> TokenBatch:
    """Return the stored token ids of a table's rows, padded on the right; ValueError for several temperatures.

    The table has the columns prompt, token_ids, loss_mask and temperature, of images also width and height; the support
    is not needed to make images of the tokens.
    """
    return _read_ragged_tokens(table, None, sources).select(range(table.height))


def _support_counts(table: pl.DataFrame) -> Ragged | None:
    missing = table["support_counts"].null_count()
    if missing == table.height:
        return None
    if missing:
        raise ValueError("some rows were sampled with top_k, top_p or min_p and some without; update on each apart")
    return ragged(table["support_counts"])


def _mapped_support_ids(files: Sequence[Path], kept: pl.Series, folder: Path) -> Int[Tensor, " entries"]:
    """Write the support ids of the kept rows to one file, in their order, and map it into memory."""
    path, wanted = folder / "support_ids", kept.to_arrow()
    with path.open("wb") as output:
        for file in files:
            stored = pq.ParquetFile(file)
            # Once a file: a search makes a table of all that it looks for.
            chosen = pc.is_in(stored.read(["sample_id"])["sample_id"].combine_chunks(), wanted)
            start = 0
            for batch in stored.iter_batches(batch_size=16, columns=["support_ids"]):
                rows = batch.filter(chosen.slice(start, len(batch)))
                output.write(rows["support_ids"].flatten().to_numpy(zero_copy_only=False).tobytes())
                start += len(batch)
    entries = path.stat().st_size // torch.int32.itemsize
    return torch.from_file(str(path), size=entries, dtype=torch.int32) if entries else torch.zeros(0, dtype=torch.int32)


def token_metrics(files: Sequence[Path]) -> dict[str, float]:
    """Return the numbers of tokens and lengths of stored rollouts; a draft's count once, however often rendered."""
    samples = scan_tables(files)
    names = samples.collect_schema().names()
    if "token_ids" not in names:
        return {}
    drafts = samples.filter(pl.col("image_number") == 0) if "image_number" in names else samples
    found = drafts.select("length", "prompt_length", "finished").collect()
    lengths: list[int] = found["length"].to_list()
    return {
        TOKENS: float(int(found["prompt_length"].sum()) + sum(lengths)),
        COMPLETION_LENGTH: sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": int((~found["finished"]).sum()) / len(lengths),
        # Only where they are fewer than the samples.
        **({} if len(lengths) == samples.select(pl.len()).collect().item() else {DRAFTS: float(len(lengths))}),
    }


STATES_BYTES = 64 * 2**20  # bytes of states that wait in memory, and from which they become a file


def denoising_columns(group: RolloutGroup) -> dict[str, Sequence[Any]]:
    """Return the columns of a group's noisy steps, one row per sample; their states are in a file of their own."""
    steps = _steps_of(group)
    return {
        "denoising_logprobs": unpadded(group.streams["denoising"].rollout_logprobs, steps.loss_mask),
        "window_start": steps.first_steps,
        "step_seed": group.request.step_seeds,
    }


def _steps_of(group: RolloutGroup) -> DenoisingBatch:
    steps = group.streams["denoising"].actions
    assert isinstance(steps, DenoisingBatch), "a stream has its own kind of actions"
    return steps


class StatesWriter:
    """Writes the states of groups to files of an artifact of rollouts, as far as they fit into memory at once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, 0
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0

    def write(self, group: RolloutGroup) -> None:
        """Append the states of a group's samples."""
        states = _steps_of(group).states
        # A copy keeps nothing of its batch in memory.
        named = zip(group.request.sample_ids, states, strict=True)
        added = {name: each.detach().cpu().contiguous().clone() for name, each in named}
        self._waiting |= added
        self._bytes += sum(each.nbytes for each in added.values())
        if self._bytes >= STATES_BYTES:
            self.close()

    def close(self) -> None:
        """Write what waits to a file, with the digest of each sample's states in their order."""
        if not self._waiting:
            return
        path = self._folder / STATES_FILE.format(0, self._files)
        path.parent.mkdir(parents=True, exist_ok=True)
        digests = [_digest_of(*named) for named in self._waiting.items()]
        save_file(self._waiting, path, {DIGESTS: json.dumps(digests)})
        self._waiting, self._bytes, self._files = {}, 0, self._files + 1


def _digest_of(sample_id: str, states: Tensor) -> str:
    digest = hashlib.sha256(f"{sample_id} {states.dtype} {tuple(states.shape)} ".encode())
    # NumPy has no bfloat16.
    digest.update(states.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_digests(path: Path) -> list[str]:
    """Return the digest of the states of each sample in a file, in the order in which they were written."""
    with safe_open(path, "pt") as file:
        return [str(digest) for digest in json.loads(file.metadata()[DIGESTS])]


def read_denoising(
    table: pl.DataFrame, folders: Sequence[Path], _scratch: Path, max_length: int, sources: Sources | None = None
) -> RaggedActions:
    """Return the stored noisy steps of a table's rows, with the drafts that their images are made of.

    The states stay on disk, and microbatches read their own; ValueError for a sample without. Arguments as
    `read_tokens`.
    """
    steps = DenoisingBatch(
        prompts=tuple(table["prompt"]),
        states=map_states(folders, table["sample_id"]),
        first_steps=tuple(table["window_start"]),
        sizes=tuple(map(ImageSize, table["width"], table["height"])),
        drafts=read_token_batch(table, sources=sources) if "token_ids" in table.columns else None,
        sources=sources,
    )
    return RaggedActions(
        actions=steps,
        rollout_logprobs=ragged(table["denoising_logprobs"]),
        finished=torch.ones(len(steps), dtype=torch.bool),
        max_length=max_length,
    )


def map_states(folders: Sequence[Path], sample_ids: pl.Series) -> tuple[Tensor, ...]:
    """Map the states of these samples in local folders into memory; ValueError names one without."""
    wanted, stored = set(sample_ids), dict[str, Tensor]()
    for path in (path for folder in folders for path in sorted(folder.glob(STATES))):
        with safe_open(path, "pt") as file:
            stored |= {name: file.get_tensor(name) for name in wanted.intersection(file.keys())}
    if missing := [each for each in sample_ids if each not in stored]:
        lost = f"{len(missing)} samples have no stored states, such as {missing[0]}"
        raise ValueError(f"{lost}; `grpo prune` may have deleted them: train on rollouts that have theirs")
    return tuple(stored[each] for each in sample_ids)


@dataclass(frozen=True)
class StoredStream:
    """How a stream of actions is stored in the table of rollouts."""

    # Returns a group's columns of the stream, one row per sample.
    columns: Callable[[RolloutGroup], Mapping[str, Sequence[Any]]]
    # Returns the actions of rows of the table, as `read_tokens`.
    read: Callable[[pl.DataFrame, Sequence[Path], Path, int, Sources | None], RaggedActions]
    max_length: str  # column with the maximum number of actions of a row
    unread: tuple[str, ...]  # patterns of the artifact's files that its update does not need


STORED_STREAMS: Mapping[Stream, StoredStream] = MappingProxyType(
    {
        "tokens": StoredStream(token_columns, read_tokens, max_length="max_length", unread=(IMAGES, STATES)),
        "denoising": StoredStream(denoising_columns, read_denoising, max_length="sde_window_size", unread=(IMAGES,)),
    }
)
