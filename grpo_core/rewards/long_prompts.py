"""Prompts with more tokens than a text encoder reads: cut with a warning, or refused."""

import logging
from collections.abc import Callable

from grpo_core.errors import InputError
from grpo_core.rewards.protocol import ScoringBatch

LONG_PROMPTS = ("cut", "refuse")
"""What a reward may do with a prompt of which its model would read the beginning alone."""

_LOGGER = logging.getLogger(__name__)


def check_prompts(
    reward: str, batch: ScoringBatch, count_tokens: Callable[[str], int], context_length: int, long_prompts: str
) -> None:
    """Tell of prompts that are longer than what the model reads; once a batch, in the log, or as an error.

    Args:
        reward: its name, for messages.
        batch: the samples.
        count_tokens: of a prompt, end marks included.
        context_length: how many the model reads.
        long_prompts: one of LONG_PROMPTS.

    Raises:
        InputError: there is one, and `long_prompts` is ``refuse``.
    """
    lengths = {prompt: count_tokens(prompt) for prompt in dict.fromkeys(batch.prompts)}
    long = [row for row, prompt in enumerate(batch.prompts) if lengths[prompt] > context_length]
    if not long:
        return
    first, tokens = batch.sample_ids[long[0]], lengths[batch.prompts[long[0]]]
    if long_prompts == "refuse":
        hint = (
            f"The model reads {context_length} tokens. Shorten the prompt, or set `long_prompts: cut` to score "
            "against its beginning."
        )
        raise InputError(f"rewards.{reward}, sample {first}", f"prompt of {tokens} tokens", hint)
    _LOGGER.warning(
        "rewards.%s: %d of %d prompts are longer than the %d tokens that the model reads, and scored by their "
        "beginning; the first is that of sample %s with %d tokens",
        *(reward, len(long), len(batch), context_length, first, tokens),
    )
