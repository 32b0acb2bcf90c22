"""The end of a completion: an end token, or the token that completes a stop text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every id that ends a text, from the generation configuration and the tokenizer, in ascending order."""
    generation = getattr(model, "generation_config", None)
    listed = [getattr(generation, "eos_token_id", None), model.config.eos_token_id, tokenizer.eos_token_id]
    ids = [ids if isinstance(ids, list) else [ids] for ids in listed]
    return tuple(sorted({int(token) for some in ids for token in some if token is not None}))


@dataclass(frozen=True)
class StopTexts:
    """Finds stop texts in a row's tokens.

    Attributes:
        tokenizer: decodes the tokens.
        texts: each ends a completion.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode to text, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def _window(self) -> int:
        # A token is a byte at least; the first of those looked at may be parts of a letter, or lose a leading space.
        return max(len(text.encode()) for text in self.texts) + 4

    def completed(self, ids: Sequence[int]) -> bool:
        """Return whether the last of these ids completes a stop text; the ids before it contain none.

        Special tokens have no text: the text on both sides of one is joined.
        """
        backwards = islice((token for token in reversed(ids) if token not in self._special), self._window)
        tail = self.decode(list(backwards)[::-1])
        return any(text in tail for text in self.texts)

    def cut(self, text: str) -> str:
        """Return the text before the first stop text in it."""
        places = [place for place in (text.find(stop) for stop in self.texts) if place >= 0]
        return text[: min(places)] if places else text
