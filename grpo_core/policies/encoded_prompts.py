"""Encoded prompts of texts, with images and of images: encoded once each, kept, and padded to a batch for a pass.

Positions are always given to the model explicitly: it would count padding on the left, or go on from the previous
caller's places in time, height and width, and log-probs would be wrong by nats without a warning.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from grpo_core.transfers import to_device

CPU = torch.device("cpu")
CACHE_BYTES = 4 * 1024**3
"""Memory of the CPU for prompts with their features, or with their pixels where the encoder is trained."""
_ID_BYTES = 64
"""Of an id in a list, with its position and its types."""


@dataclass(frozen=True)
class ImageFeatures:
    """The features of one prompt's images, as `get_image_features` of transformers returns them.

    `pooled` replace placeholders: a tensor for each image, or one of all. `deepstack` are, by layer, those added behind
    it (Qwen3-VL).
    """

    pooled: Tensor | tuple[Tensor, ...]
    deepstack: tuple[tuple[Tensor, ...], ...] = ()

    def to(self, device: torch.device) -> "ImageFeatures":
        """Return them on a device."""
        pooled = self.pooled.to(device) if isinstance(self.pooled, Tensor) else _moved(self.pooled, device)
        return ImageFeatures(pooled, tuple(_moved(layer, device) for layer in self.deepstack))

    @property
    def nbytes(self) -> int:
        """Their memory."""
        parts = (self.pooled,) if isinstance(self.pooled, Tensor) else self.pooled
        return sum(each.nbytes for each in (*parts, *(each for layer in self.deepstack for each in layer)))


def _moved(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(each.to(device) for each in tensors)


@dataclass
class _JoinedFeatures(BaseModelOutputWithPooling):
    """An output with a field for each value: what shards a model takes its arguments apart, and leaves others out."""

    deepstack_features: Any = None


def join_features(parts: Sequence[ImageFeatures]) -> Any:
    """Return the features of several rows, in order, in the form of the model's own output."""
    joined = _JoinedFeatures() if parts[0].deepstack else BaseModelOutputWithPooling()
    whole = [part.pooled for part in parts if isinstance(part.pooled, Tensor)]
    single = [each for part in parts if not isinstance(part.pooled, Tensor) for each in part.pooled]
    joined.pooler_output = torch.cat(whole) if whole else single
    if parts[0].deepstack:
        layers = zip(*(part.deepstack for part in parts), strict=True)
        joined.deepstack_features = [[each for part in layer for each in part] for layer in layers]
    return joined


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt without padding, in CPU memory.

    Attributes:
        ids: with a placeholder for each feature of its images.
        positions: of its ids, in one row, or in three by time, height and width; None: 0, 1, 2, ...
        next_positions: of the tokens that are sampled after it, in the form of `positions`; None: they count on.
        token_types: by the model's argument, one for each id.
        pixels: arguments of the model's image encoder; empty without images, or where the features are kept.
        features: of its images; None without images, or while they are not kept.
        marked: the ids with one mark in place of each image's placeholders, for an engine; None: as they are.
    """

    ids: list[int]
    positions: Tensor | None = None
    next_positions: Tensor | None = None
    token_types: Mapping[str, Tensor] = field(default_factory=dict)
    pixels: Mapping[str, Any] = field(default_factory=dict)
    features: ImageFeatures | None = None
    marked: list[int] | None = None

    @property
    def nbytes(self) -> int:
        """Its memory, about."""
        tensors = [*self.pixels.values(), self.next_positions]
        return (
            _ID_BYTES * len(self.ids)
            + sum(each.nbytes for each in tensors if isinstance(each, Tensor))
            + (0 if self.features is None else self.features.nbytes)
        )

    def keeping(self, features: ImageFeatures) -> "EncodedPrompt":
        """Return it with its features in place of its pixels."""
        return replace(self, pixels={}, features=features.to(CPU))


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts, left-padded to one length, with zeros where padded; fields as of an EncodedPrompt.

    Attributes:
        attention_mask: 1 for a prompt id, 0 for left padding.
        next_positions: any where a prompt has fewer.
        features: of each prompt's images, None without any; empty: no prompt has images.
        completion_type: the token type of a completion's ids.
        marked: without padding.
        padded: whether their lengths differ, known without a look at the mask.
    """

    input_ids: Int[Tensor, "prompts length"]
    attention_mask: Int[Tensor, "prompts length"]
    position_ids: Int[Tensor, "prompts length"] | Int[Tensor, "3 prompts length"]
    next_positions: Int[Tensor, "3 prompts time"] | None = None
    features: tuple[ImageFeatures | None, ...] = ()
    token_types: Mapping[str, Int[Tensor, "prompts length"]] = field(default_factory=dict)
    completion_type: int = 0
    marked: tuple[list[int], ...] | None = None
    padded: bool = True

    @property
    def length(self) -> int:
        """Number of ids of the padded prompt."""
        return self.input_ids.shape[1]

    @property
    def lengths(self) -> Int[Tensor, " prompts"]:
        """Number of ids of each prompt."""
        return self.attention_mask.sum(-1)

    def positions(self, time: int) -> Int[Tensor, "..."]:
        """Return the positions of the first `time` tokens of each prompt's completion, in the form of the prompt's."""
        if self.next_positions is not None:
            return self.next_positions[..., :time]
        last = self.position_ids.amax(-1)
        if last.ndim > 1:
            last = last.amax(0)
        positions = last.unsqueeze(-1) + 1 + torch.arange(time, device=last.device)
        return positions if self.position_ids.ndim == 2 else positions.expand(3, -1, -1)

    def arguments(self, time: int = 0) -> Mapping[str, Any]:
        """Return what else the model reads, for the prompts with `time` tokens of their completions."""
        found: dict[str, Any] = {
            name: nn.functional.pad(each, (0, time), value=self.completion_type)
            for name, each in self.token_types.items()
        }
        given = [each for each in self.features if each is not None]
        return {**found, "mm_encoder_outputs": {"image": join_features(given)}} if given else found

    def select(self, rows: Int[Tensor, " rows"]) -> "EncodedPrompts":
        """Return these prompts, in this order, repetitions allowed; without a wait for rows on the CPU."""
        places = rows.tolist() if self.features or self.marked else []
        rows = rows.to(self.input_ids.device, non_blocking=True)
        return replace(
            self,
            input_ids=self.input_ids[rows],
            attention_mask=self.attention_mask[rows],
            position_ids=self.position_ids[..., rows, :],
            next_positions=None if self.next_positions is None else self.next_positions[..., rows, :],
            features=tuple(self.features[row] for row in places) if self.features else (),
            token_types={name: each[rows] for name, each in self.token_types.items()},
            marked=None if self.marked is None else tuple(self.marked[row] for row in places),
        )


def pad_prompts(prompts: Sequence[EncodedPrompt], device: torch.device, *, completion_type: int = 0) -> EncodedPrompts:
    """Pad prompts of one model on the left to the longest, with id 0 outside the attention mask."""
    length = max(len(each.ids) for each in prompts)

    def padded(rows: Sequence[Tensor], dim: int = 0) -> Tensor:
        return torch.stack([nn.functional.pad(row, (length - row.shape[-1], 0)) for row in rows], dim)

    positions = [torch.arange(len(each.ids)) if each.positions is None else each.positions for each in prompts]
    names = sorted({name for each in prompts for name in each.token_types})
    zeros = [torch.zeros(len(each.ids), dtype=torch.long) for each in prompts]
    types = [[each.token_types.get(name, zero) for each, zero in zip(prompts, zeros, strict=True)] for name in names]
    features = tuple(None if each.features is None else each.features.to(device) for each in prompts)
    marked = tuple(each.ids if each.marked is None else each.marked for each in prompts)
    following = [each.next_positions for each in prompts if each.next_positions is not None]
    time = max((each.shape[-1] for each in following), default=0)
    filled = [nn.functional.pad(each, (0, time - each.shape[-1])) for each in following]
    made = [
        padded([torch.tensor(each.ids) for each in prompts]),
        padded([torch.ones(len(each.ids), dtype=torch.long) for each in prompts]),
        padded(positions, positions[0].ndim - 1),
        *map(padded, types),
        *([torch.stack(filled, 1)] if filled else []),
    ]
    input_ids, attention_mask, position_ids, *others = to_device(made, device)
    return EncodedPrompts(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        next_positions=others[len(names)] if filled else None,
        features=features if any(features) else (),
        token_types=dict(zip(names, others, strict=False)),
        completion_type=completion_type,
        marked=marked if any(each.marked is not None for each in prompts) else None,
        padded=any(len(each.ids) < length for each in prompts),
    )


@runtime_checkable
class Sized(Protocol):
    """What a cache counts."""

    @property
    def nbytes(self) -> int:
        """Its memory, about."""


V = TypeVar("V", bound=Sized)


class RecentlyUsed(Generic[V]):
    """What was used last, as much as fits into a number of bytes."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        """Start empty, for values of `limit` bytes together."""
        self._limit, self._bytes = limit, 0
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return what is kept under a key; made and kept now if nothing is."""
        if key not in self._values:
            self.put(key, make())
            return self._values[key]
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: Hashable, value: V) -> None:
        """Keep a value, and give up those whose last use is longest ago; the value itself stays, however large."""
        previous = self._values.pop(key, None)
        self._bytes += value.nbytes - (0 if previous is None else previous.nbytes)
        self._values[key] = value
        while self._bytes > self._limit and len(self._values) > 1:
            self._bytes -= self._values.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Give up all values."""
        self._values.clear()
        self._bytes = 0
