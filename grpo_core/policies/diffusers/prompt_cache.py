"""Prompts are encoded once: the text encoders are frozen, and a pipeline would run them in each of its calls."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_BYTES = 512 * 1024**2
"""Embeddings that are kept at most, on the device of the text encoders; the oldest are dropped first."""


class PromptCache:
    """A pipeline's own `encode_prompt`, with what it returned before.

    It takes that method's place: a pipeline's call encodes its prompts in its own way, negative ones included, and
    nothing here knows what the results mean. A prompt is encoded alone and repeated for each row, so that the
    embeddings of a row do not depend on the other rows.
    """

    def __init__(self, pipeline: Any, max_bytes: int = MAX_BYTES) -> None:
        """Take the method's place in the pipeline."""
        self._encode: Callable[..., Any] = pipeline.encode_prompt
        self._signature = inspect.signature(self._encode)
        self._max_bytes = max_bytes
        self._results: OrderedDict[str, Any] = OrderedDict()
        self._growths: dict[str, Any] = {}
        pipeline.encode_prompt = self

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the pipeline's method returns for these prompts.

        Raises:
            ValueError: the rows have different prompts.
        """
        given = self._signature.bind(*args, **kwargs).arguments
        counts = {len(value) for value in given.values() if isinstance(value, list)}
        if any(isinstance(value, list) and len(set(value)) > 1 for value in given.values()) or len(counts) > 1:
            raise ValueError("the rows of one call have one prompt")
        rows = counts.pop() if counts else 1
        single = {name: value[:1] if isinstance(value, list) else value for name, value in given.items()}
        key = repr(sorted(single.items()))
        if key in self._results:
            self._results.move_to_end(key)
        else:
            self._results[key] = self._encode_rows(single, 1)
            self._forget()
        result = self._results[key]
        return _repeated(result, self._growth(single, result), rows)

    def _growth(self, single: dict[str, Any], result: Any) -> Any:
        """Return which dimensions of a result belong to the rows; others, such as those of position ids, do not."""
        kind = repr(sorted((name, list if isinstance(value, list) else value) for name, value in single.items()))
        if kind not in self._growths:
            self._growths[kind] = _growing(result, self._encode_rows(single, 2))
        return self._growths[kind]

    def _encode_rows(self, single: dict[str, Any], rows: int) -> Any:
        # Z-Image writes its templates into the list that it is given.
        return self._encode(
            **{name: value * rows if isinstance(value, list) else value for name, value in single.items()}
        )

    def _forget(self) -> None:
        while sum(map(_bytes, self._results.values())) > self._max_bytes and len(self._results) > 1:
            self._results.popitem(last=False)


def _growing(one: Any, two: Any) -> Any:
    """Return, in a result's structure, the dimension along which it grows with the rows; None where it does not."""
    if isinstance(one, Tensor):
        grown = [place for place, (old, new) in enumerate(zip(one.shape, two.shape, strict=True)) if old != new]
        assert len(grown) <= 1, "one dimension of rows"
        return grown[0] if grown else None
    if isinstance(one, Sequence) and not isinstance(one, str):
        if len(one) != len(two):
            return True
        return [_growing(each, other) for each, other in zip(one, two, strict=True)]
    return None


def _repeated(result: Any, grows: Any, rows: int) -> Any:
    if grows is None:
        return result
    if isinstance(result, Tensor):
        return result.repeat_interleave(rows, grows)
    if grows is True:
        return list(result) * rows
    return type(result)(_repeated(each, own, rows) for each, own in zip(result, grows, strict=True))


def _bytes(result: Any) -> int:
    if isinstance(result, Tensor):
        return result.nbytes
    return sum(_bytes(each) for each in result) if isinstance(result, Sequence) and not isinstance(result, str) else 0
