"""Caches of keys and values: one that grows in place while sampling, and two by which completions share a prompt.

The growing one takes its memory in large pieces: a new token copies its own keys and values and no others. In a pass
with gradients one cache records the prompts, and another gives what was recorded to their completions.
"""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, cat
from transformers import Cache, DynamicCache, DynamicLayer

_GROWTH = 64


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, in memory for more tokens; DynamicLayer joins all with those of each new token."""

    keys: Tensor
    values: Tensor
    _memory: tuple[Tensor, Tensor]

    def __init__(self, filled: DynamicLayer, limit: int) -> None:
        """Take over the keys and values of a filled layer, for at most `limit` tokens of a row."""
        super().__init__()
        assert filled.keys is not None, "the prefill comes first"
        assert filled.values is not None, "the prefill comes first"
        self.dtype, self.device, self.is_initialized = filled.dtype, filled.device, True
        self._limit = limit
        self._move(filled.keys, filled.values, filled.get_seq_length())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens, and return all of them."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if end > self._memory[0].shape[-2]:
            self._move(self.keys, self.values, end)
        keys, values = self._memory
        keys[:, :, begin:end] = key_states
        values[:, :, begin:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Int[Tensor, " kept"]) -> None:
        """Keep these rows."""
        self._move(self.keys[indices], self.values[indices], self.get_seq_length())

    def _new(self, part: Tensor, *shape: int) -> Tensor:
        return part.new_empty(shape)

    def _move(
        self,
        keys: Float[Tensor, "rows heads filled dim"],
        values: Float[Tensor, "rows heads filled dim_v"],
        length: int,
    ) -> None:
        capacity = max(length, min(self._limit, length + max(_GROWTH, length // 4)))

        def moved(part: Tensor) -> tuple[Tensor, Tensor]:
            memory = self._new(part, *part.shape[:2], capacity, part.shape[3])
            filled = memory[:, :, : part.shape[2]]
            return memory, filled.copy_(part)

        (key_memory, self.keys), (value_memory, self.values) = moved(keys), moved(values)
        self._memory = key_memory, value_memory


class FixedLayer(GrowingLayer):
    """Keys and values of one layer, of which attention gets all the memory: it has to be masked where it is empty."""

    def __init__(self, filled: DynamicLayer, limit: int, place: Int[Tensor, " 1"]) -> None:
        """Take over a filled layer, for at most `limit` tokens of a row; each goes to the `place` of its time."""
        super().__init__(filled, limit)
        self._place = place

    @property
    def capacity(self) -> int:
        """The number of tokens of a row that there is memory for."""
        return self._memory[0].shape[-2]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Put the keys and values of one token to its place, and return the memory."""
        for memory, states in zip(self._memory, (key_states, value_states), strict=True):
            memory.index_copy_(2, self._place, states)
        return self._memory

    def move(self, length: int, rows: Int[Tensor, " kept"] | None = None) -> None:
        """Take other memory, with the first `length` tokens of these rows and room for more."""
        keys, values = (part[:, :, :length] if rows is None else part[rows, :, :length] for part in self._memory)
        self._move(keys, values, length)

    def _new(self, part: Tensor, *shape: int) -> Tensor:
        # No mask hides a NaN of memory that nobody has written.
        return part.new_zeros(shape)


def fix_in_place(cache: Cache, limit: int, place: Int[Tensor, " 1"]) -> list[FixedLayer]:
    """Give the layers of a filled cache memory of a fixed shape; ValueError for others than those of all tokens."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or not layer.is_initialized:
            raise ValueError(f"layer {index} of the model keeps a {type(layer).__name__}, not the keys of all tokens")
    fixed = [FixedLayer(layer, limit, place) for layer in cache.layers]
    cache.layers[:] = fixed
    return fixed


def grow_in_place(cache: Cache, limit: int) -> None:
    """Let the layers of a filled cache that keep all tokens grow in place, to `limit` tokens of a row."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[index] = GrowingLayer(layer, limit)


class _RecordingLayer(DynamicLayer):
    """Hands keys and values on as they are and keeps the first: computing a layer again changes nothing."""

    keys: Tensor | None
    values: Tensor | None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = key_states, value_states
        return key_states, value_states


class RecordingCache(DynamicCache):
    """Keeps the keys and values of one pass over prompts, with their graph; the pass itself finds it empty."""

    def __init__(self) -> None:
        """Start without layers: the model asks for as many as it has."""
        Cache.__init__(self, layer_class_to_replicate=_RecordingLayer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: nothing comes before the prompts."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys of a pass and the place of the first."""
        return query_length, 0

    def read_by(self, rows: Int[Tensor, " rows"]) -> DynamicCache:
        """Return a cache for completions of these prompts, which read the prompts' keys and values and add none."""
        cache = DynamicCache()
        cache.layers = [_ReadLayer(layer, rows) for layer in self.layers]
        return cache


class _ReadLayer(DynamicLayer):
    """Puts the keys and values of prompts before those of their completions, of which it keeps none."""

    keys: Tensor
    values: Tensor

    def __init__(self, recorded: Any, rows: Int[Tensor, " rows"]) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = recorded.dtype, recorded.device, True
        self.keys, self.values = (_of_rows(each, rows) for each in (recorded.keys, recorded.values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return cat([self.keys, key_states], -2), cat([self.values, value_states], -2)


def _of_rows(
    values: Float[Tensor, "prompts heads length dim"], rows: Int[Tensor, " rows"]
) -> Float[Tensor, "rows heads length dim"]:
    # Of one prompt it is no copy, and in the backward pass a sum.
    return values.expand(len(rows), -1, -1, -1) if len(values) == 1 else values.index_select(0, rows)
