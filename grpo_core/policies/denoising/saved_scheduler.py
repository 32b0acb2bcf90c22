"""Schedulers whose steps cannot be made noisy and scored, refused by their configuration; no library is imported."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from grpo_core.errors import InputError

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
"""The scheduler whose steps can be made noisy."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "stochastic_sampling": "adds noise of its own to every step",
        "invert_sigmas": "goes from images to noise",
    }
)
"""What a scheduler does with a setting switched on."""


def refuse_scheduler(model: str, name: object, config: Mapping[str, Any]) -> None:
    """Refuse a scheduler other than that of flow matching, or one that is stochastic by itself.

    Args:
        model: folder or hub name of the pipeline, for the message.
        name: of its class.
        config: content of its scheduler/scheduler_config.json.

    Raises:
        InputError: names the scheduler or its setting.
    """
    if name != SCHEDULER:
        hint = f"It denoises with {name}; only the steps of {SCHEDULER} can be made noisy and scored."
        raise InputError("policy.model", model, hint)
    for setting, what in _REFUSED.items():
        if config.get(setting):
            hint = f"Its scheduler {what}; set {setting} to false in scheduler/scheduler_config.json."
            raise InputError("policy.model", model, hint)
