"""Prompts of images -> ids, and the positions of all tokens of their grids.

GLM-Image keeps positions on the module between a prefill and its decode steps; they are taken from there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GlmImageProcessor

from grpo_core.errors import InputError
from grpo_core.policies.encoded_prompts import EncodedPrompt, EncodedPrompts, pad_prompts
from grpo_core.rollouts.streams import ImageSize


def refuse_reserved_tokens(processor: GlmImageProcessor, prompt: str) -> None:
    """Raise InputError if a prompt contains a tag that the tokenizer reads as an image or grid token."""
    tokenizer = processor.tokenizer
    reserved = {*tokenizer.all_special_tokens, processor.image_token, processor.grid_bos_token, "<|dit_token_"}
    for token in sorted(reserved):
        if token and token in prompt:
            raise InputError("prompt", prompt, f"Remove {token!r}: the model reads it as structure, not as text.")


Codes = Int[Tensor, "_ _"]
"""The ids of a source image in its rows and columns, which the vision tower and its quantizer give it."""


def encode_prompts(
    model: Any,
    processor: GlmImageProcessor,
    prompts: Sequence[str],
    size: ImageSize,
    sources: Sequence[Sequence[Codes]] = (),
) -> EncodedPrompts:
    """Encode at least one prompt for one image size, padded to one length; arguments and errors of `encode_prompt`."""
    given = zip(prompts, sources or ((),) * len(prompts), strict=True)
    encoded = [encode_prompt(model, processor, prompt, size, codes) for prompt, codes in given]
    return pad_prompts(encoded, next(model.parameters()).device)


@torch.no_grad()
def encode_prompt(
    model: Any, processor: GlmImageProcessor, prompt: str, size: ImageSize, codes: Sequence[Codes] = ()
) -> EncodedPrompt:
    """Encode a prompt for an image size: its ids end with the tags of the grids and the image's start token.

    Its `next_positions`, by the inner GlmImageModel, are those of every token of the grids in the order they are
    sampled, and of the end slot. Codes of source images stand in the ids. InputError for a reserved tag.
    """
    refuse_reserved_tokens(processor, prompt)
    if codes:
        inputs = _edit_inputs(processor, prompt, size, codes)
    else:
        inputs = processor.apply_chat_template(
            [[{"role": "user", "content": [{"type": "text", "text": prompt}]}]],
            tokenize=True,
            return_dict=True,
            processor_kwargs={"target_h": size.height, "target_w": size.width, "return_tensors": "pt"},
        )
    names = ("image_grid_thw", "images_per_sample", "attention_mask")
    positions, _ = model.get_rope_index(inputs["input_ids"], **{name: inputs[name] for name in names})
    grids = model._cached_decode_position_ids[0]
    # A forward pass without positions would read them.
    model.rope_deltas = model._cached_decode_position_ids = model._prefill_len = None
    return EncodedPrompt(inputs["input_ids"][0].tolist(), positions[:, 0], grids)


def _edit_inputs(
    processor: GlmImageProcessor, prompt: str, size: ImageSize, codes: Sequence[Codes]
) -> dict[str, Tensor]:
    """Return what the processor gives for a prompt with images, with codes in place of pixels."""
    rows, columns, *_ = processor._get_target_shape(size.height, size.width)
    tags = f"{processor.grid_bos_token}{rows} {columns}{processor.grid_eos_token}{processor.bos_token}"
    content = [*({"type": "image"} for _ in codes), {"type": "text", "text": prompt}]
    printed = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    # The template writes one mark per image.
    start, *others = printed.split(processor.image_token)
    marked = (processor.image_token * each.numel() + text for each, text in zip(codes, others, strict=True))
    inputs = dict(processor.tokenizer([start + "".join(marked) + tags], return_tensors="pt"))
    ids, flat = inputs["input_ids"], torch.cat([each.flatten().cpu() for each in codes])
    return {
        **inputs,
        "input_ids": ids.masked_scatter(ids == processor.image_token_id, flat.to(ids.dtype)),
        "image_grid_thw": torch.tensor([*([1, *each.shape] for each in codes), [1, rows, columns]]),
        "images_per_sample": torch.tensor([len(codes) + 1]),
    }
