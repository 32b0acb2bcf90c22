"""The stream of denoising steps in stored rollouts: its columns, and its rows for training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch

from grpo_core.groups import RolloutGroup
from grpo_core.image_size import ImageSize
from grpo_core.records import DenoisingBatch, SampledActions
from tasks.rollouts.states import map_states
from tasks.rollouts.tokens import read_token_batch
from tasks.storage.tables.lists import padded, unpadded


def denoising_columns(group: RolloutGroup) -> dict[str, Sequence[Any]]:
    """Return the columns of a group's noisy steps, one row per sample; their states are in a file of their own."""
    sampled, request = group.streams["denoising"], group.request
    assert isinstance(sampled.actions, DenoisingBatch), "a stream has its own kind of actions"
    return {
        "denoising_logprobs": unpadded(sampled.rollout_logprobs, sampled.actions.loss_mask),
        "window_start": sampled.actions.first_steps,
        "step_seed": request.step_seeds,
    }


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
