"""An exported folder as a model that is sampled: its adapter over the base that it names, or a merged model."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_core.errors import InputError
from grpo_core.policies.trained.settings import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from grpo_core.rollouts.streams import STREAMS
from tasks.models.initial import model_digest

_OF_BASE = ("revision", "adapter", "lora", "denoising_lora", "frozen", "quantization")


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter, or one for each stream in a folder of its name."""
    return any((place / ADAPTER_CONFIG_FILE).is_file() for place in _places(folder))


def _places(folder: Path) -> tuple[Path, ...]:
    return (folder, *(folder / each for each in STREAMS))


def policy_values(folder: Path, policy: Mapping[str, Any], *, merged: bool) -> dict[str, Any]:
    """Return a section `policy` that is sampled with the weights of a folder, given that of the training."""
    if merged:
        return {**policy, "model": str(folder), **dict.fromkeys(_OF_BASE)}
    return {**policy, "adapter": str(folder), "lora": None}


def require_same_base(recorded: str | None, policy: Mapping[str, Any]) -> None:
    """Refuse an exported adapter over another model under the name of its base."""
    found = model_digest(policy["model"], policy.get("revision")) if recorded else None
    if found != recorded:
        hint = f"Its files here are {str(found)[:12]}, and the adapter's base is {str(recorded)[:12]}; restore them."
        raise InputError("policy.model", policy["model"], hint)


def adapter_over(folder: Path, model: str, scratch: Path) -> Path:
    """Return a copy of an exported adapter below `scratch` whose base is this model: the same one, elsewhere."""
    copy = scratch / "adapter"
    for place in _places(folder):
        if (config := place / ADAPTER_CONFIG_FILE).is_file():
            own = copy / place.relative_to(folder)
            own.mkdir(parents=True, exist_ok=True)
            moved = {**json.loads(config.read_text()), "base_model_name_or_path": model, "revision": None}
            (own / ADAPTER_CONFIG_FILE).write_text(json.dumps(moved))
            os.symlink((place / ADAPTER_FILE).absolute(), own / ADAPTER_FILE)
    return copy
