"""What ends a completion: an end token, or the token that completes a stop text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every id that ends a text, from the generation configuration and the tokenizer, in ascending order."""
    generation = getattr(model, "generation_config", None)
    listed = [
        getattr(generation, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ]
    ids = [ids if isinstance(ids, list) else [ids] for ids in listed]
    return tuple(sorted({int(token) for some in ids for token in some if token is not None}))


@dataclass(frozen=True)
class StopTexts:
    """Finds stop texts, each of which ends a completion, in a row's tokens."""

    tokenizer: PreTrainedTokenizerBase
    texts: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.texts)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def _special(self) -> frozenset[int]:
        added = {token for token, known in self.tokenizer.added_tokens_decoder.items() if known.special}
        return frozenset(added.union(self.tokenizer.all_special_ids))

    @cached_property
    def _window(self) -> int:
        # A token is a byte at least; the first of those looked at may be parts of a letter, or lose a leading space.
        return max(len(text.encode()) for text in self.texts) + 4

    def completed(self, ids: Sequence[int]) -> bool:
        """Return whether the last of these ids completes a stop text; the ids before it contain none.

        Special tokens are read as their texts, as `generate` of transformers reads them for stop_strings.
        """
        tail = self._decode(ids[-self._window :], skip_special_tokens=False)
        return any(text in tail for text in self.texts)

    def visible(self, ids: Sequence[int]) -> str:
        """Return the text before the first stop text in it, without special tokens."""
        text = self._decode(ids, skip_special_tokens=False)
        places = [place for place in (text.find(stop) for stop in self.texts) if place >= 0]
        if not places:
            return self._decode(ids, skip_special_tokens=True)
        place = min(places)
        for count in reversed(range(len(ids))):
            before = self._decode(ids[:count], skip_special_tokens=False)
            # Part of a letter is decoded as another one.
            if len(before) <= place and text.startswith(before):
                # The stop text may begin inside a token.
                rest = "" if ids[count] in self._special else text[len(before) : place]
                return self._decode(ids[:count], skip_special_tokens=True) + rest
        raise AssertionError("no ids have no text")
