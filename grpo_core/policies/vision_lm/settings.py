"""The options of sampling completions of prompts with images."""

from dataclasses import dataclass

from pydantic import PositiveInt

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.settings import CausalLMSettings


@dataclass(frozen=True)
class VisionLMSettings(CausalLMSettings):
    """How completions of prompts with images are sampled.

    Attributes:
        min_pixels: smaller images are scaled up to it; None: the image processor's.
        max_pixels: larger images are scaled down to it; None: the image processor's.
    """

    min_pixels: PositiveInt | None = None
    max_pixels: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise InputError("rollout.min_pixels", self.min_pixels, f"max_pixels is {self.max_pixels}; lower it.")
