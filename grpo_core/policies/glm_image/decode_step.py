"""One decode step of the token model, with its mask and rotary embedding computed once.

The model's own forward pass makes both for each token, which takes as long as two layers of a small model.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, GlmImageForConditionalGeneration
from transformers.masking_utils import create_causal_mask

from grpo_core.policies.causal_lm.decode_steps import ModelStep


class DecodeStep(ModelStep):
    """Maps the last token of every row to the logits of the next."""

    def __init__(
        self,
        model: GlmImageForConditionalGeneration,
        cache: Cache,
        attention_mask: Int[Tensor, "rows total"] | None,
        position_ids: Int[Tensor, "3 rows time"],
    ) -> None:
        super().__init__(model, cache, attention_mask, position_ids)
        self._text, self._head = model.model.language_model, model.lm_head
        self._embed = model.get_input_embeddings()
        example = self._embed.weight.new_empty(0)
        cosines, sines = self._text.rotary_emb(example, position_ids)
        self._rotations = list(zip(cosines.split(1, 1), sines.split(1, 1), strict=True))
        self._padding, self._mask = attention_mask, None
        if attention_mask is not None and self._text.config._attn_implementation in ("sdpa", "eager"):
            added = torch.zeros(attention_mask.shape, dtype=example.dtype, device=example.device)
            self._mask = added.masked_fill(attention_mask == 0, -torch.inf)[:, None, None]

    def __call__(self, ids: Int[Tensor, " rows"], index: int) -> Float[Tensor, "rows vocab"]:
        """Return the logits that follow the token at `index`."""
        hidden = self._embed(ids.unsqueeze(1))
        mask: Any = self._padding
        if self._padding is not None:
            length = self._cache.get_seq_length() + 1
            mask = self._padding[:, :length] if self._mask is None else self._mask[..., :length]
            if self._mask is None:
                mask = create_causal_mask(self._text.config, hidden, mask, self._cache)
        for layer in self._text.layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_embeddings=self._rotations[index],
                past_key_values=self._cache,
                use_cache=True,
            )
        logits: Tensor = self._head(self._text.norm(hidden))
        return logits[:, -1]
