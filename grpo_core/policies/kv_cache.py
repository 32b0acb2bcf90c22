"""A cache that takes its memory in large pieces: a new token copies its own keys and values and no others."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, DynamicLayer

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

    def _move(
        self,
        keys: Float[Tensor, "rows heads filled dim"],
        values: Float[Tensor, "rows heads filled dim_v"],
        length: int,
    ) -> None:
        capacity = max(length, min(self._limit, length + max(_GROWTH, length // 4)))

        def moved(part: Tensor) -> tuple[Tensor, Tensor]:
            memory = part.new_empty(*part.shape[:2], capacity, part.shape[3])
            filled = memory[:, :, : part.shape[2]]
            return memory, filled.copy_(part)

        (key_memory, self.keys), (value_memory, self.values) = moved(keys), moved(values)
        self._memory = key_memory, value_memory


def grow_in_place(cache: Cache, limit: int) -> None:
    """Let the layers of a filled cache that keep all tokens grow in place, to `limit` tokens of a row."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[index] = GrowingLayer(layer, limit)
