"""How completions are sampled, as a record."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from grpo_core.sampling import Truncation


@dataclass(frozen=True)
class CausalLMSettings:
    """How completions are sampled.

    Attributes:
        temperature: of the token distribution.
        top_k: only the k likeliest ids can be drawn; 0: off.
        top_p: only the likeliest ids that together have this probability can be drawn; 1: off.
        min_p: only ids at least this times as probable as the likeliest can be drawn; 0: off.
        max_completion_length: tokens, at most.
        stop: texts that end a completion, at the token that completes one of them.
        system_prompt: goes before every prompt that brings no system message; needs a chat template.
        chat_template: print prompts by the tokenizer's template; None does where there is one.
    """

    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_completion_length: PositiveInt = 256
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    system_prompt: str | None = None
    chat_template: bool | None = None

    @property
    def truncation(self) -> Truncation:
        """Which ids can be drawn."""
        return Truncation(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
