"""Prompts -> input ids and positions. Positions are given to the model explicitly, always.

GLM-Image keeps position state on the module between a prefill and its decode steps; a forward pass without
`position_ids` reads the state of the previous caller, and the log-probs are wrong by nats without a warning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GlmImageProcessor

from grpo_core.errors import InputError
from grpo_core.policies.glm_image.settings import Grid, preview_grid


class UnitProcessor(GlmImageProcessor):
    """GlmImageProcessor for any pixel unit, not only 32: a decoder with a smaller patch has a smaller unit."""

    unit = 32

    def _get_target_shape(self, height: int, width: int) -> tuple[int, int, int, int]:
        large = Grid(height // self.unit, width // self.unit)
        preview = preview_grid(large, self.unit)
        return large.rows, large.columns, preview.rows, preview.columns


# A saved pipeline names the classes of its parts: it must load without this project.
UnitProcessor.__name__ = GlmImageProcessor.__name__


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts encoded for the autoregressive model, left-padded to one length.

    Attributes:
        input_ids: prompt ids with the grid tags and the image's start token.
        attention_mask: 1 for a prompt id, 0 for left padding.
        position_ids: (time, height, width) position of every prompt id, of every token of both grids in the
            order they are sampled, and of the end slot.
    """

    input_ids: Int[Tensor, "prompts length"]
    attention_mask: Int[Tensor, "prompts length"]
    position_ids: Int[Tensor, "3 prompts total"]

    @property
    def length(self) -> int:
        """Number of ids of the padded prompt."""
        return self.input_ids.shape[1]

    def repeat(self, times: int) -> "EncodedPrompts":
        """Repeat every prompt `times` times, siblings next to each other."""
        return EncodedPrompts(
            self.input_ids.repeat_interleave(times, 0),
            self.attention_mask.repeat_interleave(times, 0),
            self.position_ids.repeat_interleave(times, 1),
        )

    def select(self, rows: Int[Tensor, " rows"]) -> "EncodedPrompts":
        """Return these prompts, in this order, repetitions allowed."""
        return EncodedPrompts(self.input_ids[rows], self.attention_mask[rows], self.position_ids[:, rows])


def refuse_reserved_tokens(processor: GlmImageProcessor, prompt: str) -> None:
    """Raise InputError if a prompt contains a tag that the tokenizer reads as an image or grid token."""
    tokenizer = processor.tokenizer
    reserved = {*tokenizer.all_special_tokens, processor.image_token, processor.grid_bos_token, "<|dit_token_"}
    for token in sorted(reserved):
        if token and token in prompt:
            raise InputError("prompt", prompt, f"Remove {token!r}: the model reads it as structure, not as text.")


def encode_prompts(
    model: Any, processor: GlmImageProcessor, prompts: Sequence[str], height: int, width: int
) -> EncodedPrompts:
    """Encode distinct prompts for one image size.

    Args:
        model: the inner GlmImageModel, which computes the positions.
        processor: the pipeline's processor.
        prompts: at least one.
        height: pixels.
        width: pixels.

    Raises:
        InputError: a prompt contains a reserved tag.
    """
    for prompt in prompts:
        refuse_reserved_tokens(processor, prompt)
    messages = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}] for prompt in prompts]
    inputs = processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"padding": True, "target_h": height, "target_w": width, "return_tensors": "pt"},
    )
    device = next(model.parameters()).device
    ids, mask = inputs["input_ids"].to(device), inputs["attention_mask"].to(device)
    with torch.no_grad():
        prompt_positions, _ = model.get_rope_index(
            ids,
            image_grid_thw=inputs["image_grid_thw"].to(device),
            images_per_sample=inputs["images_per_sample"].to(device),
            attention_mask=mask,
        )
    grid_positions = model._cached_decode_position_ids.permute(1, 0, 2)
    model.rope_deltas = model._cached_decode_position_ids = model._prefill_len = None
    return EncodedPrompts(ids, mask, torch.cat([prompt_positions, grid_positions.to(prompt_positions.dtype)], -1))
