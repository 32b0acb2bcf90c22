"""The passes after a prefill, over one token of every row: the model's own, or one of fixed shapes.

Passes of fixed shapes are the same operations on the same memory, so a GPU can run them as a CUDA graph: the host
launches one thing instead of some thousands. A graph is captured for each number of rows and each size of the cache.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from grpo_core.errors import InputError
from grpo_core.policies.kv_cache import fix_in_place, grow_in_place

PLACE = "rollout.cache_implementation"


def without_router_losses(model: Any) -> dict[str, bool]:
    """Return the arguments of a call that leave out the losses of routers, which some configurations ask for.

    They are computed from a mask without the keys in a cache.
    """
    asked = getattr(model.config.get_text_config(), "output_router_logits", False)
    return {"output_router_logits": False} if asked else {}


@contextmanager
def unread_padding(device: torch.device, *, padded: bool) -> Iterator[None]:
    """Let a model of transformers make its mask on a GPU without a look at the padding: whether there is any is known.

    It looks whether any row is padded, to do without a mask, and so waits for the GPU in each pass.
    """
    if device.type == "cpu":
        yield
        return
    make: Callable[..., Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    known = {"allow_is_causal_skip": False} if padded else {"attention_mask": None}

    def make_known(**given: Any) -> Tensor | None:
        # Only where it would look; masks of other kinds have other padding.
        return make(**given | (known if given["allow_is_causal_skip"] else {}))

    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = make_known
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


class ModelStep:
    """Maps the last token of every row to the logits of the next by the model's own pass."""

    shrinks_at: ClassVar[float] = 0.75
    """Rows that have ended leave when at most this share is left: each time copies the cache."""

    def __init__(
        self,
        model: Any,
        cache: Cache,
        attention_mask: Int[Tensor, "rows total"] | None,
        position_ids: Int[Tensor, "*axes rows time"],
    ) -> None:
        """Take the cache of the prefill, the mask with all tokens to come (None: no row is padded) and their places."""
        self._model, self._cache = model, cache
        self._attention, self._positions = attention_mask, position_ids
        self._prefilled = cache.get_seq_length()
        self._limit = self._prefilled + position_ids.shape[-1]
        self._options: Mapping[str, Any] = {
            "past_key_values": cache,
            "use_cache": True,
            "logits_to_keep": 1,
            **without_router_losses(model),
        }
        self._prepare()

    def _prepare(self) -> None:
        grow_in_place(self._cache, self._limit)

    def __call__(self, ids: Int[Tensor, " rows"], index: int) -> Float[Tensor, "rows vocab"]:
        """Return the logits that follow the token at `index`."""
        attention = self._attention
        with unread_padding(ids.device, padded=attention is not None):
            logits: Tensor = self._model(
                input_ids=ids.unsqueeze(1),
                attention_mask=None if attention is None else attention[:, : self._prefilled + index + 1],
                position_ids=self._positions[..., index : index + 1],
                **self._options,
            ).logits
        return logits[:, -1]

    def keep(self, rows: Int[Tensor, " kept"], index: int) -> None:
        """Go on with these rows alone after the token at `index` was sampled, which the cache does not have yet."""
        self._cache.batch_select_indices(rows)
        self._positions = self._positions[..., rows, :]
        self._attention = None if self._attention is None else self._attention[rows]


class StaticStep(ModelStep):
    """The same over a cache of a fixed shape, masked where it is empty; on a GPU by a CUDA graph."""

    shrinks_at = 0.5
    # The memory that graphs compute in is theirs, and the next one takes it over while the last one lives.
    _last: ClassVar[torch.cuda.CUDAGraph | None] = None
    _graph: torch.cuda.CUDAGraph | None
    _ids: Int[Tensor, "rows 1"]
    _has_run: bool

    def _prepare(self) -> None:
        if not self._model._can_compile_fullgraph:
            hint = f"transformers has no static cache for {type(self._model).__name__}; use dynamic."
            raise InputError(PLACE, "static", hint)
        device = self._positions.device
        if self._attention is None:
            self._attention = torch.ones(self._positions.shape[-2], self._limit, dtype=torch.long, device=device)
        self._dtype = self._model.get_input_embeddings().weight.dtype
        self._index, self._place = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        self._columns = torch.arange(self._limit, device=device)
        try:
            self._layers = fix_in_place(self._cache, self._limit, self._place)
        except ValueError as error:
            raise InputError(PLACE, "static", f"{error}; use dynamic.") from error
        self._start()

    def __call__(self, ids: Int[Tensor, " rows"], index: int) -> Float[Tensor, "rows vocab"]:
        """Return the logits that follow the token at `index`; the next call may overwrite them."""
        filled = self._prefilled + index
        if filled == self._layers[0].capacity:
            for layer in self._layers:
                layer.move(filled)
            self._start()
        self._ids.copy_(ids.unsqueeze(1))
        self._index.fill_(index)
        if ids.device.type == "cpu" or not self._has_run:
            # What a first pass of these shapes alone does cannot be captured.
            with _refused("does not take a mask of the cache"):
                logits = self._pass()
            self._has_run = True
            return logits
        if self._graph is None:
            self._graph, self._logits = self._captured()
        self._graph.replay()
        return self._logits

    def keep(self, rows: Int[Tensor, " kept"], index: int) -> None:
        """Go on with these rows alone, in smaller tensors."""
        for layer in self._layers:
            layer.move(self._prefilled + index, rows)
        assert self._attention is not None, "it is there from the start"
        self._attention, self._positions = self._attention[rows], self._positions[..., rows, :]
        self._start()

    def _start(self) -> None:
        self._has_run, self._graph = False, None
        self._ids = self._index.new_zeros(self._positions.shape[-2], 1)
        assert self._attention is not None, "it is there from the start"
        self._padding = self._attention[:, : self._layers[0].capacity] == 0

    def _pass(self) -> Float[Tensor, "rows vocab"]:
        torch.add(self._index, self._prefilled, out=self._place)
        hidden = self._padding | (self._columns[: self._padding.shape[1]] > self._place)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device).masked_fill(hidden, -torch.inf)
        positions = self._positions.index_select(-1, self._index)
        found = self._model(
            input_ids=self._ids, attention_mask=mask[:, None, None], position_ids=positions, **self._options
        )
        logits: Tensor = found.logits
        return logits[:, -1]

    def _captured(self) -> tuple[torch.cuda.CUDAGraph, Float[Tensor, "rows vocab"]]:
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(self._index.device)
        stream.wait_stream(torch.cuda.current_stream(self._index.device))
        with _refused("cannot be captured as a CUDA graph"), torch.cuda.stream(stream):
            # Rewards may use the GPU in other threads meanwhile.
            pool = None if StaticStep._last is None else StaticStep._last.pool()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                logits = self._pass()
            finally:
                graph.capture_end()
        StaticStep._last = graph
        return graph, logits


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    # Memory, as that of cuBLAS, belongs to a stream.
    return torch.cuda.Stream(device)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turn what a model's code raises into the error of the setting."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    # Its own code may raise any of them on a mask that it does not expect.
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        hint = f"A pass of the model {what} ({str(error).splitlines()[0]}); use dynamic."
        raise InputError(PLACE, "static", hint) from error
