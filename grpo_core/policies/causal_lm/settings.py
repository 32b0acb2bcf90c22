"""How completions are sampled, as a record."""

from dataclasses import dataclass

from grpo_core.sampling import Truncation


@dataclass(frozen=True)
class CausalLMSettings:
    """How completions are sampled.

    Attributes:
        temperature: of the token distribution.
        top_k: as in grpo_core.sampling.Truncation, likewise the next two; 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        max_completion_length: tokens, at most.
        stop: texts that end a completion, at the token that completes one of them.
        system_prompt: goes before every prompt that brings no system message; needs a chat template.
        chat_template: print prompts by the tokenizer's template; None does where there is one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_completion_length: int = 256
    stop: tuple[str, ...] = ()
    system_prompt: str | None = None
    chat_template: bool | None = None

    @property
    def truncation(self) -> Truncation:
        """Which ids can be drawn."""
        return Truncation(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
