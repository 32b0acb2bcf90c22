"""Stored adapters as other libraries load them: peft every one, and diffusers those of a pipeline's transformer."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from configs.sections import PolicySection
from grpo_core.errors import InputError
from grpo_core.policies.trained.stored_adapter import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from grpo_core.streams import Stream

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
"""Where diffusers looks for an adapter in a folder."""

# Where diffusers looks for the settings of an adapter; without them it takes alpha for the rank.
_METADATA = "lora_adapter_metadata"
_PEFT_PREFIX, _DIFFUSERS_PREFIX = "base_model.model.", "transformer."


def write_adapter(stream: Stream, weights: Path, folder: Path, section: PolicySection) -> None:
    """Write the adapter of a component in every format that it is loaded in.

    Args:
        weights: folder of the stored component.
        folder: created if it does not exist.

    Raises:
        InputError: diffusers cannot load an adapter of this kind.
    """
    folder.mkdir(exist_ok=True)
    config = json.loads((weights / ADAPTER_CONFIG_FILE).read_text())
    # Of a revision, the stored one names this machine's copy.
    config |= {"base_model_name_or_path": section.model, "revision": section.revision}
    for write in _FORMATS[stream]:
        write(weights, folder, config)


def _write_for_peft(weights: Path, folder: Path, config: Mapping[str, Any]) -> None:
    from safetensors.torch import load_file, save_file

    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True))
    metadata = {"format": "pt", _METADATA: json.dumps(config, sort_keys=True)}
    save_file(load_file(weights / ADAPTER_FILE), folder / ADAPTER_FILE, metadata)


def _write_for_diffusers(weights: Path, folder: Path, config: Mapping[str, Any]) -> None:
    """Write names and settings with the prefix that they have in diffusers; alpha is among the settings alone."""
    from safetensors.torch import load_file, save_file

    if config.get("modules_to_save"):
        hint = "diffusers loads adapters alone; export the whole model with --merge."
        raise InputError("policy.lora.modules_to_save", config["modules_to_save"], hint)
    state = load_file(weights / ADAPTER_FILE)
    renamed = {f"{_DIFFUSERS_PREFIX}{name.removeprefix(_PEFT_PREFIX)}": value for name, value in state.items()}
    settings = {f"{_DIFFUSERS_PREFIX}{name}": value for name, value in config.items()}
    metadata = {"format": "pt", _METADATA: json.dumps(settings, sort_keys=True)}
    save_file(renamed, folder / DIFFUSERS_FILE, metadata)


_FORMATS: Mapping[Stream, tuple[Callable[[Path, Path, Mapping[str, Any]], None], ...]] = MappingProxyType(
    {"tokens": (_write_for_peft,), "denoising": (_write_for_peft, _write_for_diffusers)}
)
