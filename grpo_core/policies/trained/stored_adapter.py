"""The settings of an adapter that is stored in peft's format, read without its weights and without peft."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from grpo_core.errors import InputError
from grpo_core.policies.trained.choice import LoraSettings

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
PLACE = "policy.adapter"
_BASE_UNCHANGED = (True, False, "gaussian", "orthogonal")
# peft computes them from the model's weights and takes them out of these, with the same result each time.
_REPEATED = ("pissa", "olora")


def read_adapter_config(folder: Path, name: str) -> dict[str, Any]:
    """Read a stored adapter's configuration.

    Args:
        folder: has adapter_config.json and adapter_model.safetensors.
        name: the adapter as people call it, for errors.

    Raises:
        InputError: a file is missing or damaged, it is not LoRA, it has biases, or its initialisation changed the
            model's weights in a way that is not repeated here.
    """
    for file in (ADAPTER_CONFIG_FILE, ADAPTER_FILE):
        if not (folder / file).is_file():
            hint = f"It has no {file}; give an adapter that peft's save_pretrained wrote, as safetensors."
            raise InputError(PLACE, name, hint)
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
        kind, bias = config["peft_type"], config.get("bias", "none")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(PLACE, name, f"Its {ADAPTER_CONFIG_FILE} is damaged ({error!r}); save it again.") from error
    if kind != "LORA" or bias != "none" or config.get("lora_bias"):
        hint = f"It is {kind} with bias {bias}; training goes on from LoRA adapters without biases."
        raise InputError(PLACE, name, hint)
    made = config.get("init_lora_weights", True)
    if made not in (*_BASE_UNCHANGED, *_REPEATED):
        hint = f"It was initialised with {made}, which changed the model's weights; merge it into the model first."
        raise InputError(PLACE, name, hint)
    return config


def adapter_settings(config: dict[str, Any]) -> LoraSettings:
    """Return the settings of a stored adapter; one that began as its base model needs no initialisation.

    Args:
        config: of `read_adapter_config`.
    """
    targets = config["target_modules"]
    if not isinstance(targets, str):
        targets = rf"(.*\.)?({'|'.join(re.escape(name) for name in sorted(targets or ()))})"
    whole = config.get("modules_to_save")
    return LoraSettings(
        rank=config["r"],
        alpha=config["lora_alpha"],
        targets=targets,
        use_rslora=config.get("use_rslora", False),
        use_dora=config.get("use_dora", False),
        modules_to_save=None if whole is None else tuple(whole),
        init_lora_weights=made if (made := config.get("init_lora_weights")) in _REPEATED else True,
    )


def refuse_other_settings(stored: LoraSettings, settings: LoraSettings, name: str) -> None:
    """Refuse settings that contradict those of the stored adapter; default targets and initialisation follow it.

    Raises:
        InputError: names the setting and both values.
    """
    follows = {"targets": None, "init_lora_weights": True}
    for field in fields(LoraSettings):
        given, found = getattr(settings, field.name), getattr(stored, field.name)
        if given != found and not (field.name in follows and given == follows[field.name]):
            hint = f"The adapter {name} has {found!r}; set policy.lora to null to follow it, or train a new adapter."
            raise InputError(f"policy.lora.{field.name}", given, hint)
