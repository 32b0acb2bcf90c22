"""The streams in stored rollouts, tokens and denoising steps: their columns, rows for training, and metrics.

The latents of noisy steps, called states, are files of their own in the artifact of rollouts, since they are as large
as the images and only an update needs them: it maps them into memory. A window of two steps at 1024 x 1024 pixels is
1.5 MiB per sample in 16 bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from grpo_core.actions import DenoisingBatch, Sources, TokenBatch, TokenSupport
from grpo_core.records import RolloutGroup, SampledActions, SampledTokens
from grpo_core.streams import ImageSize
from tasks.metrics import COMPLETION_LENGTH, DRAFTS, TOKENS
from tasks.runs.layout import PARTS, STATES
from tasks.storage.lists import lists_of, padded, unpadded
from tasks.storage.parquet import scan_tables


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
) -> SampledActions:
    """Return the stored tokens of a table's rows.

    The tokens of all rows are in memory at once, about 13 bytes each. The ids that a truncated sampler could choose, up
    to thousands for each token, stay on disk, and microbatches read their own.

    Args:
        table: rows of rollouts, in the order in which they are stored.
        folders: local folders of the rollouts.
        scratch: folder for local files that the tokens are read from.
        max_length: of SampledActions.
        sources: the images in each row's prompt; None: no prompt has any.

    Raises:
        ValueError: rows of several temperatures, or with and without a stored support.
    """
    ids = _mapped_support_ids(sample_files(folders), table["sample_id"], scratch)
    return SampledActions(
        actions=read_token_batch(table, _support(table, ids), sources),
        rollout_logprobs=padded(table["rollout_logprobs"]),
        finished=table["finished"].to_torch(),
        max_length=max_length,
    )


def read_token_batch(
    table: pl.DataFrame, support: TokenSupport | None = None, sources: Sources | None = None
) -> TokenBatch:
    """Return the stored token ids of a table's rows, padded on the right.

    Args:
        table: with the columns prompt, token_ids, loss_mask and temperature, of images also width and height.
        support: the ids that could be sampled; not needed to make images of the tokens.
        sources: the images in each row's prompt; None: no prompt has any.

    Raises:
        ValueError: rows of several temperatures.
    """
    temperatures = table["temperature"].unique().to_list()
    if len(temperatures) > 1:
        raise ValueError(
            f"the rows were sampled at several temperatures, {sorted(temperatures)}; update on each separately"
        )
    return TokenBatch(
        prompts=tuple(table["prompt"]),
        token_ids=padded(table["token_ids"]).long(),
        loss_mask=padded(table["loss_mask"]),
        temperature=temperatures[0] if temperatures else 1.0,
        support=support,
        sizes=tuple(map(ImageSize, table["width"], table["height"])) if "width" in table.columns else None,
        sources=sources,
    )


def _support(table: pl.DataFrame, ids: Tensor) -> TokenSupport | None:
    missing = table["support_counts"].null_count()
    if missing == table.height:
        return None
    if missing:
        raise ValueError(
            "some rows were sampled with top_k, top_p or min_p and some without; update on each separately"
        )
    return TokenSupport(ids, padded(table["support_counts"]).long())


def _mapped_support_ids(files: Sequence[Path], kept: pl.Series, folder: Path) -> Int[Tensor, " entries"]:
    """Write the support ids of the kept rows to one file, in their order, and map it into memory."""
    path = folder / "support_ids"
    with path.open("wb") as output:
        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=16, columns=["sample_id", "support_ids"]):
                rows = batch.filter(pc.is_in(batch["sample_id"], kept.to_arrow()))
                output.write(rows["support_ids"].flatten().to_numpy(zero_copy_only=False).tobytes())
    entries = path.stat().st_size // torch.int32.itemsize
    return torch.from_file(str(path), size=entries, dtype=torch.int32) if entries else torch.zeros(0, dtype=torch.int32)


def token_metrics(files: Sequence[Path]) -> dict[str, float]:
    """Return the number of tokens, with those of the prompts, and the lengths of the drafts, of stored rollouts.

    The tokens of a draft count once, however often it is rendered. Empty for rollouts without tokens.
    """
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


_ALIGNMENT = 8
"""Bytes: a multiple of the size of every dtype, so that a sample of any can follow one of any other."""


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


def state_rows(group: RolloutGroup) -> Iterator[dict[str, Sequence[Any]]]:
    """Yield the columns of the states of one sample after another, as they are stored."""
    states = _steps_of(group).states
    for sample_id, each in zip(group.request.sample_ids, states, strict=True):
        yield {
            "sample_id": [sample_id],
            "states": [[_to_bytes(state) for state in each.cpu()]],
            "dtype": [str(each.dtype).removeprefix("torch.")],
            "shape": [list(each.shape[1:])],
        }


def _to_bytes(state: Tensor) -> bytes:
    # NumPy has no bfloat16.
    return state.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def read_denoising(
    table: pl.DataFrame, folders: Sequence[Path], scratch: Path, max_length: int, sources: Sources | None = None
) -> SampledActions:
    """Return the stored noisy steps of a table's rows, with the drafts that their images are made of.

    The states stay on disk, and microbatches read their own.

    Args:
        table: rows of rollouts.
        folders: local folders of the rollouts.
        scratch: folder for local files that the states are read from; it must stay while they are used.
        max_length: of SampledActions.
        sources: the images in each row's prompt; None: no prompt has any.

    Raises:
        ValueError: a sample without states, or drafts of several temperatures.
    """
    steps = DenoisingBatch(
        prompts=tuple(table["prompt"]),
        states=map_states(folders, table["sample_id"], scratch),
        first_steps=tuple(table["window_start"]),
        sizes=tuple(map(ImageSize, table["width"], table["height"])),
        drafts=read_token_batch(table, sources=sources) if "token_ids" in table.columns else None,
        sources=sources,
    )
    return SampledActions(
        actions=steps,
        rollout_logprobs=padded(table["denoising_logprobs"]),
        finished=torch.ones(len(steps), dtype=torch.bool),
        max_length=max_length,
    )


@dataclass(frozen=True)
class _Stored:
    """Where the states of a sample are in the mapped file."""

    offset: int
    count: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, mapped: Shaped[Tensor, " bytes"]) -> Shaped[Tensor, "states ..."]:
        size = self.count * self.dtype.itemsize * torch.Size(self.shape).numel()
        return mapped[self.offset : self.offset + size].view(self.dtype).view(self.count, *self.shape)


def map_states(folders: Sequence[Path], sample_ids: pl.Series, scratch: Path) -> tuple[Tensor, ...]:
    """Map the states of these samples into memory, in this order: pages are read when they are used.

    Parquet interleaves values and their lengths, so the states are copied to one file first.

    Args:
        folders: local folders of the rollouts.
        scratch: folder for that file, which must stay while the states are used.

    Raises:
        ValueError: states of a sample are missing or cut; the sample is named.
    """
    path, stored = scratch / "states", dict[str, _Stored]()
    with path.open("wb") as output:
        for row in _rows_of(folders, sample_ids):
            stored[row["sample_id"].as_py()] = _copy(row, output)
    if missing := [each for each in sample_ids if each not in stored]:
        raise ValueError(
            f"{len(missing)} samples have no stored states, such as {missing[0]}; `grpo prune` may have deleted them: "
            "train on rollouts that have theirs"
        )
    size = path.stat().st_size
    mapped = torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.zeros(0, dtype=torch.uint8)
    return tuple(stored[each].view(mapped) for each in sample_ids)


def _rows_of(folders: Sequence[Path], sample_ids: pl.Series) -> Iterator[dict[str, pa.Scalar]]:
    wanted = sample_ids.to_arrow()
    for path in (path for folder in folders for path in sorted(folder.glob(STATES))):
        # Otherwise a whole row group is buffered once more.
        with pq.ParquetFile(path, memory_map=True) as file:
            for batch in file.iter_batches(batch_size=4):
                rows = batch.filter(pc.is_in(batch["sample_id"], wanted))
                for place in range(rows.num_rows):
                    yield {name: rows[name][place] for name in rows.schema.names}


def _copy(row: dict[str, pa.Scalar], output: IO[bytes]) -> _Stored:
    output.write(bytes(-output.tell() % _ALIGNMENT))
    dtype, shape = getattr(torch, row["dtype"].as_py()), tuple(row["shape"].as_py())
    stored = _Stored(output.tell(), len(row["states"]), dtype, shape)
    size = dtype.itemsize * torch.Size(shape).numel()
    for state in row["states"].values:
        blob = state.as_buffer()
        if blob is None or blob.size != size:
            raise ValueError(f"the states of {row['sample_id'].as_py()} do not have their shape {shape} in {dtype}")
        output.write(blob)
    return stored
