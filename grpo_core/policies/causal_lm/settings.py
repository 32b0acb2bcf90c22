"""The options of sampling completions."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveInt

from grpo_core.sampling_settings import TokenSamplingSettings


@dataclass(frozen=True)
class CausalLMSettings(TokenSamplingSettings):
    """How completions are sampled.

    Attributes:
        max_completion_length: maximum number of tokens.
        stop: texts that end a completion, at the token that completes one of them.
        system_prompt: precedes every prompt without a system message; needs a chat template.
        chat_template: format prompts with the tokenizer's template; None: if it has one.
    """

    max_completion_length: PositiveInt = 256
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    system_prompt: str | None = None
    chat_template: bool | None = None
