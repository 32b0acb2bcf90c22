"""Load the pipeline's components by folder or hub name, with diffusers' loader."""

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
    """Return the pixels along one side of a large token, which covers two by two patches of the decoder."""
    return int(2 * pipeline.transformer.config.patch_size * pipeline.vae_scale_factor)


def load_pipeline(model: str, *, dtype: torch.dtype, device: torch.device) -> GlmImagePipeline:
    """Load all components of a GLM-Image, frozen, in evaluation mode.

    Args:
        model: a folder written by `save_pretrained`, or a hub name such as zai-org/GLM-Image.
        dtype: of the weights.
        device: of the weights.

    Raises:
        InputError: the folder does not exist or is no pipeline, or the hub's files are not available.
    """
    refuse_missing_folder(model)
    # Their progress bars would break ours.
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        pipeline = GlmImagePipeline.from_pretrained(model, dtype=dtype, use_safetensors=True, trust_remote_code=False)
    except (OSError, ValueError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0]
        hint = f"Give a folder with complete files, or a hub name whose files are cached or reachable ({first_line})."
        raise InputError("policy.model", model, hint) from error
    stock = pipeline.processor
    pipeline.processor = UnitProcessor(stock.image_processor, stock.tokenizer, chat_template=stock.chat_template)
    pipeline.processor.unit = pixel_unit(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    # Its tensors are the largest of all; with one image at a time their size does not depend on the batch.
    pipeline.vae.enable_slicing()
    for part in (pipeline.vision_language_encoder, pipeline.text_encoder, pipeline.transformer, pipeline.vae):
        part.requires_grad_(False)
        part.eval()
    return pipeline.to(device)


def read_initial_state(model: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load the published weights of the autoregressive model."""
    loaded = GlmImageForConditionalGeneration.from_pretrained(
        model, subfolder=AUTOREGRESSIVE, dtype=dtype, use_safetensors=True
    )
    state: dict[str, Tensor] = loaded.state_dict()
    return state


def refuse_unusable_prompts(model: str, prompts: Sequence[str]) -> None:
    """Refuse prompts that contain the model's reserved tags; only its processor is loaded.

    Raises:
        InputError: names the first such prompt.
    """
    processor = GlmImageProcessor.from_pretrained(model, subfolder="processor")
    for prompt in dict.fromkeys(prompts):
        refuse_reserved_tokens(processor, prompt)
