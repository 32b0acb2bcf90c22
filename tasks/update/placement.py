"""Which placements of an update this machine can run."""

import os
from collections.abc import Mapping

import torch

from configs.sections import PlacementSection
from configs.training import AnyUpdateSection
from grpo_core.errors import InputError
from grpo_core.streams import UNEQUAL_PASSES, Stream


def refuse_unusable_placement(placement: PlacementSection, updates: Mapping[Stream, AnyUpdateSection]) -> None:
    """Raise InputError for a number of processes, or a way to shard the weights, that this machine cannot run."""
    if placement.sharding == "fsdp2":
        _refuse_unusable_sharding(placement, updates)
    on_cpu = placement.device == "cpu" or (placement.device == "auto" and not torch.cuda.is_available())
    if placement.processes == 1:
        return
    if on_cpu:
        # Two processes are allowed on any machine, so that the feature can be tried everywhere.
        cores = max(2, len(os.sched_getaffinity(0)))
        if placement.processes > cores:
            hint = f"Each process needs a core and this machine has {cores}; use at most that."
            raise InputError("placement.processes", placement.processes, hint)
        return
    gpus = torch.cuda.device_count()
    if placement.processes > gpus:
        hint = f"Each process needs a GPU and this machine has {gpus}; use at most that, or device: cpu."
        raise InputError("placement.processes", placement.processes, hint)


def _refuse_unusable_sharding(placement: PlacementSection, updates: Mapping[Stream, AnyUpdateSection]) -> None:
    if placement.processes == 1:
        hint = "One process cannot shard the weights; set placement.processes to 2 or more, or this to ddp."
        raise InputError("placement.sharding", "fsdp2", hint)
    for stream, update in updates.items():
        section = f"update.{stream}" if len(updates) > 1 else "update"
        if update.optimizer != "adamw":
            hint = "8-bit and paged moments cannot be sharded; use adamw, or set placement.sharding to ddp."
            raise InputError(f"{section}.optimizer", update.optimizer, hint)
        if stream in UNEQUAL_PASSES and update.micro_batch_size > 1:
            hint = (
                "Processes that share sharded weights make equally many passes, and rows of other prompts or image "
                "sizes take passes of their own; set it to 1, or placement.sharding to ddp."
            )
            raise InputError(f"{section}.micro_batch_size", update.micro_batch_size, hint)
