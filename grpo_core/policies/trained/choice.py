"""The records that say what of a model is trained."""

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from grpo_core.errors import InputError

Reference = Literal["none", "device", "cpu"]


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (Hu et al., 2021, arXiv:2106.09685).

    Attributes:
        rank: r of the decomposition.
        alpha: the update is scaled by alpha / rank.
        targets: regular expression over the full names of the linear layers that get an adapter; None takes the
            policy's own choice.
    """

    rank: PositiveInt = 32
    alpha: PositiveFloat = 64.0
    targets: str | None = None


@dataclass(frozen=True)
class TrainingChoice:
    """What of a model is trained.

    Attributes:
        lora: adapters over the frozen model; None trains every weight outside the frozen parts.
        frozen: regular expression over the full names of parameters that are left alone, beside the policy's own
            frozen parts; with `lora` every weight is, so it has to be None.
        reference: where the reference's weights are kept when every weight is trained: on the model's device, in CPU
            memory, or nowhere. Adapters have their reference at no cost.
        gradient_checkpointing: recompute activations in the backward pass.
        seed: of the adapters' random half.

    Raises:
        InputError: `frozen` is no regular expression, or stands beside `lora`.
    """

    lora: LoraSettings | None
    frozen: str | None = None
    reference: Reference = "none"
    gradient_checkpointing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.frozen is None:
            return
        if self.lora is not None:
            hint = "Adapters leave every weight of the model alone; leave it out, or train without adapters."
            raise InputError("policy.frozen", self.frozen, hint)
        try:
            re.compile(self.frozen)
        except re.error as error:
            hint = f"It is no regular expression ({error}); give one over the full names of parameters."
            raise InputError("policy.frozen", self.frozen, hint) from error
