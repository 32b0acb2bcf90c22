"""One token's forward pass through the layers of the token model, with all that does not change prepared before.

The model's own forward pass rebuilds the attention mask and the rotary embedding for each token, which takes as long as
two layers of a small model. Here the layers are called themselves, and so are their adapters and hooks.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, GlmImageForConditionalGeneration
from transformers.masking_utils import create_causal_mask


class DecodeStep:
    """Maps the last token of every row to the logits of the next."""

    def __init__(
        self,
        model: GlmImageForConditionalGeneration,
        cache: Cache,
        attention_mask: Int[Tensor, "rows total"],
        position_ids: Int[Tensor, "3 rows time"],
    ) -> None:
        """Prepare mask and rotary embedding.

        Args:
            model: without peft's wrapper; adapters are in its layers.
            cache: holds the keys and values of the prompts; each step adds those of one token.
            attention_mask: 0 for left padding, else 1, of the prompts and of all tokens to come.
            position_ids: (time, height, width) of the tokens to come.
        """
        self._text, self._head, self._cache = model.model.language_model, model.lm_head, cache
        self._embed = model.get_input_embeddings()
        example = self._embed.weight.new_empty(0)
        cosines, sines = self._text.rotary_emb(example, position_ids)
        self._rotations = list(zip(cosines.split(1, 1), sines.split(1, 1), strict=True))
        self._padding = None if attention_mask.all() else attention_mask
        self._mask: Tensor | None = None
        if self._padding is not None and self._text.config._attn_implementation in ("sdpa", "eager"):
            added = torch.zeros(attention_mask.shape, dtype=example.dtype, device=example.device)
            self._mask = added.masked_fill(attention_mask == 0, -torch.inf)[:, None, None]

    def __call__(self, ids: Int[Tensor, " rows"], index: int) -> Float[Tensor, "rows vocab"]:
        """Return the logits that follow the token at `index`."""
        hidden = self._embed(ids.unsqueeze(1))
        mask = self._mask_for(hidden)
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

    def _mask_for(self, hidden: Float[Tensor, "rows 1 dim"]) -> Any:
        """Return the mask in the form of the model's attention; None where no row is padded."""
        if self._padding is None:
            return None
        length = self._cache.get_seq_length() + 1
        if self._mask is not None:
            return self._mask[..., :length]
        return create_causal_mask(self._text.config, hidden, self._padding[:, :length], self._cache)
