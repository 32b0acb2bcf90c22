"""The options of sampling completions."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from grpo_core.sampling import Truncation


@dataclass(frozen=True)
class CausalLMSettings:
    """How completions are sampled.

    Attributes:
        temperature: of the token distribution.
        top_k: only the k likeliest ids can be sampled; 0: off.
        top_p: only the likeliest ids that together have this probability can be sampled; 1: off.
        min_p: only ids at least this times as probable as the likeliest can be sampled; 0: off.
        max_completion_length: maximum number of tokens.
        stop: texts that end a completion, at the token that completes one of them.
        system_prompt: precedes every prompt without a system message; needs a chat template.
        chat_template: format prompts with the tokenizer's template; None: if it has one.
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
        """Which ids can be sampled."""
        return Truncation(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
