"""A folder or a hub name -> the pipeline's components, by diffusers' own loader."""

from collections.abc import Sequence

import diffusers
import torch
import transformers
from diffusers import GlmImagePipeline
from safetensors import SafetensorError
from torch import Tensor
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from grpo_core.errors import InputError
from grpo_core.policies.glm_image.architecture import AUTOREGRESSIVE
from grpo_core.policies.glm_image.folder import refuse_missing_folder
from grpo_core.policies.glm_image.prompts import UnitProcessor, refuse_reserved_tokens


def pixel_unit(pipeline: GlmImagePipeline) -> int:
    """Pixels along one side of a large token: the decoder sees two by two patches for each."""
    return int(2 * pipeline.transformer.config.patch_size * pipeline.vae_scale_factor)


def load_pipeline(model: str, *, dtype: torch.dtype, device: torch.device) -> GlmImagePipeline:
    """All components of a GLM-Image, frozen, in evaluation mode.

    Args:
        model: a folder written by `save_pretrained`, or a hub name such as zai-org/GLM-Image.
        dtype: of the weights.
        device: where they go.

    Raises:
        InputError: the folder does not exist or is no pipeline, or the hub's files are not at hand.
    """
    refuse_missing_folder(model)
    # Their bars would tear the training's own.
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        pipeline = GlmImagePipeline.from_pretrained(model, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    except (OSError, ValueError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0]
        hint = f"Give a folder of whole files, or a hub name whose files are cached or reachable ({first_line})."
        raise InputError("policy.model", model, hint) from error
    stock = pipeline.processor
    pipeline.processor = UnitProcessor(stock.image_processor, stock.tokenizer, chat_template=stock.chat_template)
    pipeline.processor.unit = pixel_unit(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    # Its tensors are the widest of all; one image at a time, their size does not depend on the batch.
    pipeline.vae.enable_slicing()
    for part in (pipeline.vision_language_encoder, pipeline.text_encoder, pipeline.transformer, pipeline.vae):
        part.requires_grad_(False)
        part.eval()
    return pipeline.to(device)


def read_initial_state(model: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The autoregressive model's weights as published."""
    loaded = GlmImageForConditionalGeneration.from_pretrained(
        model, subfolder=AUTOREGRESSIVE, dtype=dtype, use_safetensors=True
    )
    state: dict[str, Tensor] = loaded.state_dict()
    return state


def refuse_unusable_prompts(model: str, prompts: Sequence[str]) -> None:
    """Look for prompts that hold the model's own tags, by its processor alone.

    Raises:
        InputError: names the first such prompt.
    """
    processor = GlmImageProcessor.from_pretrained(model, subfolder="processor")
    for prompt in dict.fromkeys(prompts):
        refuse_reserved_tokens(processor, prompt)
