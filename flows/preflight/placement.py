"""Where a run works: devices and optimizers of this machine, the storage root, and the packages of its trackers."""

from collections.abc import Iterator
from functools import partial

import torch

from configs.schema import RunConfig
from configs.validation import error_at
from flows.preflight.prompts import PromptFiles
from grpo_core.errors import InputError
from grpo_core.optimizer import refuse_unavailable
from grpo_core.policies.trained import refuse_unavailable_attention
from tasks.models.resident import torch_device
from tasks.storage.artifacts.store import open_store
from tasks.update.placement import refuse_unusable_placement

EXTRAS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
"""Trackers for which this package has an extra; it has the name of the tracker."""


def check_device(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report what this machine lacks for the stages that run on it."""
    device, placement = config.placement.device, config.placement
    if placement.rollouts.pool and placement.update.pool:
        # The device is that of the workers, which report when it is missing.
        return
    if device == "cuda" and not torch.cuda.is_available():
        yield InputError("placement.device", "cuda", "PyTorch finds no CUDA device here. Set it to auto or cpu.")
        return
    if placement.update.pool:
        # The rest depends on the worker's machine.
        return
    checks = [
        partial(refuse_unavailable_attention, config.policy.attn_implementation),
        partial(refuse_unusable_placement, placement, config.updates),
    ]
    for check in checks:
        try:
            check()
        except InputError as error:
            yield error
    for stream, update in config.updates.items():
        try:
            refuse_unavailable(update.optimizer, torch_device(placement))
        except InputError as error:
            yield error_at(config.update_path(stream), error)


def check_storage(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report a storage root that cannot be opened."""
    try:
        open_store(config.storage, config.run.name)
    except InputError as error:
        yield error


def check_trackers(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report trackers that accelerate does not know, or whose package is not installed."""
    if not config.run.trackers:
        return
    # It imports torch, which a command without trackers may not need yet.
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    missing = {str(name) for name in LoggerType} - {str(name) for name in get_available_trackers()}
    # Those that a program has registered need no package.
    installed = sorted({*LOGGER_TYPE_TO_CLASS} - missing)
    here = f"Installed here: {', '.join(installed) or 'none'}."
    for index, name in enumerate(config.run.trackers):
        if name in installed:
            continue
        if name in LOGGER_TYPE_TO_CLASS:
            package = {"mlflow": "mlflow-skinny"}.get(name, name)
            extra = f", which the extra {name} of this package brings" if name in EXTRAS else ""
            hint = f"Its package is missing: `uv pip install {package}`{extra}. {here}"
        else:
            hint = f"There is no such tracker; choose among {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}. {here}"
        yield InputError(f"run.trackers.{index}", name, hint)
