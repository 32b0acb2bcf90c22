"""The settings that select what of a model is trained, and those of an adapter stored in peft's format."""

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PositiveFloat, PositiveInt, Strict

from grpo_core.errors import InputError
from grpo_core.policies.trained.quantization import QuantizationSettings, refuse_adapters
from grpo_core.uses import Uses

Reference = Literal["none", "device", "cpu"]
CopyName = Literal["reference", "ema", "old"]
"""Copies of the trained weights: of the reference, their moving average, and the policy before an update, or, in
DiffusionNFT, the one that samples."""

Initialisation = Literal[True, "gaussian", "pissa", "olora"]


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (Hu et al., 2021, arXiv:2106.09685).

    Attributes:
        rank: r of the decomposition.
        alpha: the update is scaled by alpha / rank.
        targets: regular expression over the full names of linear layers; None: the policy's default.
        use_rslora: scale by alpha / sqrt(rank) instead (Kalajdzievski, 2023, arXiv:2312.03732).
        use_dora: train the magnitude of each column apart from its direction (Liu et al., 2024, arXiv:2402.09353).
        modules_to_save: last names of modules that are fully trained and saved with the adapter, such as `lm_head`.
        init_lora_weights: true (Kaiming-uniform) and gaussian start as the base model, with B = 0; pissa (Meng et al.,
            2024, arXiv:2404.02948) and olora (Buyukakyuz, 2024, arXiv:2406.01775) move a part of each weight into its
            adapter.
    """

    rank: PositiveInt = 32
    alpha: PositiveFloat = 64.0
    targets: Annotated[str | None, Uses.NOTHING] = None
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: Annotated[tuple[str, ...], Strict(False), Uses.NOTHING] | None = None
    init_lora_weights: Initialisation = True


@dataclass(frozen=True)
class TrainingChoice:
    """What of a model is trained.

    Attributes:
        lora: adapters over the frozen model; None trains every weight outside the frozen parts.
        frozen: regular expression over the full names of parameters that are frozen in addition to the policy's
            frozen parts; has to be None with `lora`, which freezes every weight.
        reference: where the reference's weights are kept when every weight is trained: on the model's device, in CPU
            memory, or nowhere. With adapters the reference needs no memory.
        gradient_checkpointing: recompute activations in the backward pass.
        seed: for the random half of the adapters.
        adapter: folder of a stored adapter in peft's format that training starts from, with the settings of `lora`.
        hub: name and revision of a model that is loaded from a copy of that revision, for saved adapters.
        freeze_vision: of a vision-language model, train the language model alone, not what encodes its images.
        quantization: of the weights that are not trained, in 4 bits; None: in their dtype.
    """

    lora: LoraSettings | None
    frozen: str | None = None
    reference: Reference = "none"
    gradient_checkpointing: bool = False
    seed: int = 0
    adapter: Path | None = None
    hub: tuple[str, str] | None = None
    freeze_vision: bool = True
    quantization: QuantizationSettings | None = None

    @property
    def starts_as_base(self) -> bool:
        """Whether training starts from the model as it was given, which is then the reference without a copy."""
        return self.lora is not None and self.adapter is None and self.lora.init_lora_weights in (True, "gaussian")

    def __post_init__(self) -> None:
        if self.quantization is not None:
            refuse_adapters(self.quantization, self.lora)
        if self.frozen is None:
            return
        if self.lora is not None:
            hint = "Adapters already freeze every weight of the model; leave it out, or train without adapters."
            raise InputError("policy.frozen", self.frozen, hint)
        try:
            re.compile(self.frozen)
        except re.error as error:
            hint = f"It is not a regular expression ({error}); give one over the full names of parameters."
            raise InputError("policy.frozen", self.frozen, hint) from error


ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
PLACE = "policy.adapter"
_BASE_UNCHANGED = (True, False, "gaussian", "orthogonal")
MOVING = ("pissa", "olora")
"""Initialisations that peft computes from the weights and takes out of them, each time with the same result."""


def read_adapter_config(folder: Path, name: str) -> dict[str, Any]:
    """Read a stored adapter's configuration, of the folder that people call `name`.

    InputError if a file is missing or damaged, or it is no LoRA without biases over an unchanged base, or `MOVING`.
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
        hint = f"It is {kind} with bias {bias}; training continues from LoRA adapters without biases."
        raise InputError(PLACE, name, hint)
    made = config.get("init_lora_weights", True)
    if made not in (*_BASE_UNCHANGED, *MOVING):
        hint = f"It was initialised with {made}, which changed the model's weights; merge it into the model first."
        raise InputError(PLACE, name, hint)
    return config


def adapter_settings(config: dict[str, Any]) -> LoraSettings:
    """Return the settings of a stored adapter; one that began as its base model needs no initialisation."""
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
        init_lora_weights=made if (made := config.get("init_lora_weights")) in MOVING else True,
    )


def refuse_other_settings(stored: LoraSettings, settings: LoraSettings, name: str) -> None:
    """Raise InputError for settings that contradict the adapter's; default targets and initialisation follow it."""
    follows = {"targets": None, "init_lora_weights": True}
    for field in fields(LoraSettings):
        given, found = getattr(settings, field.name), getattr(stored, field.name)
        if given != found and not (field.name in follows and given == follows[field.name]):
            hint = f"The adapter {name} has {found!r}; set policy.lora to null to follow it, or train a new adapter."
            raise InputError(f"policy.lora.{field.name}", given, hint)
