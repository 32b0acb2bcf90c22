"""The options of sampling completions."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveInt

from grpo_core.errors import InputError
from grpo_core.settings import TokenSamplingSettings
from grpo_core.uses import Uses


@dataclass(frozen=True)
class CausalLMSettings(TokenSamplingSettings):
    """How completions are sampled.

    Attributes:
        max_completion_length: in tokens.
        stop: texts that end a completion, at the token that completes one of them.
        system_prompt: precedes every prompt without a system message; needs a chat template.
        chat_template: format prompts with the tokenizer's template; None: if it has one.
    """

    max_completion_length: PositiveInt = 256
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Uses.NOTHING] = ()
    system_prompt: Annotated[str | None, Uses.NOTHING] = None
    chat_template: bool | None = None


@dataclass(frozen=True)
class Context:
    """How many ids a model reads and writes together, None if unbounded; `why` if another length than configured."""

    length: int | None = None
    why: str = ""

    def __str__(self) -> str:
        return f"{self.length}{self.why}"

    @property
    def at_most(self) -> int | None:
        """The context that an engine may have at most: one with a larger one takes other frequencies for all rows."""
        return self.length if self.why else None

    def refuse_too_long(self, max_completion_length: int) -> None:
        """Raise InputError for completions that leave no room for any prompt."""
        if self.length is not None and max_completion_length >= self.length:
            hint = f"The model reads {self} ids, prompt and completion together; set it lower."
            raise InputError("rollout.max_completion_length", max_completion_length, hint)
