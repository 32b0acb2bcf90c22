"""The prompts of a pipeline, encoded once each, by the content of what its encoders are given."""

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from grpo_core.policies.denoising.rows import only_errors
from grpo_core.policies.encoded_prompts import CACHE_BYTES, CPU, RecentlyUsed

_COPIES = "num_images_per_prompt"
_PROBES = ("a", "a cat and a dog " * 40)
"""Some pipelines pad to multiples of 8, 16 or more ids."""


@dataclass(frozen=True)
class _Kept:
    """What the encoders returned, in CPU memory: on a device a stage's embeddings would take the samples' place.

    What came from a GPU is pinned, so that the way back there runs beside the passes.
    """

    leaves: tuple[Any, ...]
    structure: TreeSpec
    devices: tuple[torch.device | None, ...]

    @classmethod
    def of(cls, result: Any) -> "_Kept":
        leaves, structure = tree_flatten(result)
        kept = tuple(_on_host(each) if isinstance(each, Tensor) else each for each in leaves)
        devices = tuple(each.device if isinstance(each, Tensor) else None for each in leaves)
        return cls(kept, structure, devices)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.leaves if isinstance(each, Tensor))

    def returned(self) -> Any:
        pairs = zip(self.leaves, self.devices, strict=True)
        leaves = [each if device is None else each.to(device, non_blocking=True) for each, device in pairs]
        return tree_unflatten(leaves, self.structure)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.cpu().pin_memory() if tensor.is_cuda else tensor.to(CPU)


class PromptCache:
    """A pipeline's own `encode_prompt`, with what it returned before, in that method's place.

    A pipeline's call encodes its prompts in its own way, and nothing here knows what the results mean. Each prompt is
    encoded alone, so the embeddings of a row do not depend on the other rows.
    """

    def __init__(
        self,
        pipeline: Any,
        max_bytes: int = CACHE_BYTES,
        encoding: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Take the method's place; `encoding` is a context in which the text encoders can be run."""
        self._encoding = encoding
        self._encode: Callable[..., Any] = pipeline.encode_prompt
        self._signature = inspect.signature(self._encode)
        self._results = RecentlyUsed[_Kept](max_bytes)
        self._growths: dict[str, Any] = {}
        pipeline.encode_prompt = self

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the pipeline's method returns; ValueError for embeddings of several lengths, or mixed masks."""
        given = self._signature.bind(*args, **kwargs).arguments
        times = given.get(_COPIES, 1)
        if times > 1:
            given[_COPIES] = 1
        lists = {name: value for name, value in given.items() if _is_by_row(name, value)}
        rows = list(zip(*lists.values(), strict=True)) or [()]
        singles = {row: {**given, **{name: [value] for name, value in zip(lists, row, strict=True)}} for row in rows}
        found = {row: self._encoded(single) for row, single in singles.items()}
        results = [found[row] for row in rows for _ in range(times)]
        if len(results) == 1:
            return copy.deepcopy(results[0])
        if len({_structure(each) for each in found.values()}) > 1:
            raise ValueError("the prompts of one call have embeddings of one kind, with masks or without")
        return _joined(results, self._growth(singles[rows[0]], results[0], copies=times > 1))

    @cached_property
    def pads_to_one_length(self) -> bool:
        """Whether embeddings have one length, whatever the prompt: then rows of several prompts can share a call."""
        # Stable Diffusion 3 has no default for its second and third prompt.
        needed = {name: None for name, each in self._signature.parameters.items() if each.default is each.empty}
        with torch.no_grad(), only_errors():
            short, long = (self._encode_rows({**needed, "prompt": [text]}, 1) for text in _PROBES)
        return bool(_shapes(short) == _shapes(long))

    def _encoded(self, single: dict[str, Any]) -> Any:
        key = content_digest(single)
        if key is None:
            return self._encode_rows(single, 1)
        return self._results.get(key, lambda: _Kept.of(self._encode_rows(single, 1))).returned()

    def _growth(self, single: dict[str, Any], result: Any, *, copies: bool) -> Any:
        """Return which dimensions of a result belong to the rows; `copies`: rows are copies of one prompt."""

        def found() -> Any:
            two = self._encode_rows({**single, _COPIES: 2}, 1) if copies else self._encode_rows(single, 2)
            return _growing(result, two)

        values = {name: "row" if _is_by_row(name, value) else _kind(value) for name, value in single.items()}
        # A pipeline may return no mask where all positions are a prompt's.
        kind = content_digest({**values, "copies": copies, "result": _structure(result)})
        if kind is None:
            return found()
        if kind not in self._growths:
            self._growths[kind] = found()
        return self._growths[kind]

    def _encode_rows(self, single: dict[str, Any], rows: int) -> Any:
        with self._encoding():
            # Z-Image writes its templates into the list that it is given.
            return self._encode(
                **{name: value * rows if _is_by_row(name, value) else value for name, value in single.items()}
            )


def _is_by_row(name: str, value: Any) -> bool:
    """Return whether an argument has one item a row; Sana's instructions are a list of lines for all rows."""
    return isinstance(value, list) and "prompt" in name


def _kind(value: Any) -> Any:
    if isinstance(value, list):
        return [_kind(each) for each in value]
    return "image" if isinstance(value, Image.Image) else value


def content_digest(value: Any) -> str | None:
    """Return a digest of an argument by its pixels and values; None for what has no known content."""
    digest = hashlib.sha256()
    try:
        for part in _content(value):
            digest.update(len(part).to_bytes(8, "little") + part)
    except TypeError:
        return None
    return digest.hexdigest()


def _content(value: Any) -> Iterator[bytes]:
    """Yield what a value consists of, with its type."""
    yield type(value).__name__.encode()
    match value:
        case None | bool() | int() | float() | str() | torch.dtype() | torch.device():
            yield repr(value).encode()
        case Tensor():
            whole = value.detach().cpu().contiguous()
            yield repr((whole.dtype, tuple(whole.shape))).encode()
            yield whole.flatten().view(torch.uint8).numpy().tobytes()
        case Image.Image():
            yield repr((value.mode, value.size, value.getpalette())).encode()
            yield value.tobytes()
        case list() | tuple():
            yield len(value).to_bytes(8, "little")
            for each in value:
                yield from _content(each)
        case dict():
            yield from _content(sorted(value.items()))
        case _:
            raise TypeError(f"no content of a {type(value).__name__}")


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


def _joined(results: Sequence[Any], grows: Any) -> Any:
    """Join the results of several rows: parts that grow with the rows one after another, others as they are."""
    first = results[0]
    if grows is None:
        return first
    if isinstance(first, Tensor):
        if len({each.shape for each in results}) > 1:
            raise ValueError("the prompts of one call have embeddings of one length")
        return torch.cat(list(results), grows)
    if grows is True:
        return [each for result in results for each in result]
    return type(first)(_joined(parts, own) for parts, own in zip(zip(*results, strict=True), grows, strict=True))


def _structure(result: Any) -> Any:
    if isinstance(result, Sequence) and not isinstance(result, str):
        return tuple(_structure(each) for each in result)
    return type(result).__name__


def _shapes(result: Any) -> list[Any]:
    return [tuple(each.shape) for each in tree_leaves(result) if isinstance(each, Tensor)]
