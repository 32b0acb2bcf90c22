"""The stream of denoising steps in stored rollouts: its columns, its rows for training, and the latents of its steps.

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
from jaxtyping import Shaped
from torch import Tensor

from grpo_core.groups import RolloutGroup
from grpo_core.image_size import ImageSize
from grpo_core.records import DenoisingBatch, SampledActions
from tasks.rollouts.tokens import read_token_batch
from tasks.runs.layout import STATES
from tasks.storage.tables.lists import padded, unpadded

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


def read_denoising(table: pl.DataFrame, folders: Sequence[Path], scratch: Path, max_length: int) -> SampledActions:
    """Return the stored noisy steps of a table's rows, with the drafts that their images are made of.

    The states stay on disk, and microbatches read their own.

    Args:
        table: rows of rollouts.
        folders: local folders of the rollouts.
        scratch: folder for local files that the states are read from; it must stay while they are used.
        max_length: of SampledActions.

    Raises:
        ValueError: a sample without states, or drafts of several temperatures.
    """
    steps = DenoisingBatch(
        prompts=tuple(table["prompt"]),
        states=map_states(folders, table["sample_id"], scratch),
        first_steps=tuple(table["window_start"]),
        sizes=tuple(map(ImageSize, table["width"], table["height"])),
        drafts=read_token_batch(table) if "token_ids" in table.columns else None,
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
