"""The hyperparameters of the tiny GLM-Image, its parts with fresh weights, and the folder that diffusers loads."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImagePipeline, GlmImageTransformer2DModel
from transformers import (
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

from data.recipes import trainer
from data.recipes.autoencoder import build_cell_autoencoder
from data.recipes.shapes import CELL_PIXELS, CODEBOOK_SIZE, IMAGE_PIXELS, ShapesRecipe, all_scenes
from grpo_core.policies.glm_image.processor import UnitProcessor

IMAGE_START_ID = CODEBOOK_SIZE
IMAGE_END_ID = CODEBOOK_SIZE + 1
# As in the released model, the output head is wider than codes, start and end together, and text ids begin after it.
VISION_VOCAB_SIZE = 8 * (CODEBOOK_SIZE // 8 + 1) + 8

_PAD, _GRID_BOS, _GRID_EOS, _IMAGE = "<|endoftext|>", "<sop>", "<eop>", "<|image|>"


@dataclass(frozen=True)
class TinyRecipe(ShapesRecipe):
    """How the tiny GLM-Image is built and trained; the same recipe gives the same weights on the same machine.

    The policy learns the meaning of captions and also slips and stray cells, which training with rewards can remove.

    Attributes:
        rope_theta: base of the rotary frequencies; a grid of eight rows needs fast ones, or columns look alike.
        latent_std: pixels, in [-1, 1], per latent; a small value makes the decoder's noise small against the image.
        prior_drop_probability: probability that the image tokens are dropped in decoder training, for guidance.
    """

    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    key_value_heads: int = 2
    intermediate_size: int = 256
    rope_theta: float = 10.0
    initializer_range: float = 0.05
    autoregressive_steps: int = 800
    autoregressive_batch: int = 32
    autoregressive_learning_rate: float = 4e-3
    decoder_size: int = 96
    decoder_layers: int = 1
    decoder_heads: int = 2
    decoder_steps: int = 900
    decoder_batch: int = 8
    decoder_learning_rate: float = 3e-3
    latent_std: float = 0.2
    prior_drop_probability: float = 0.15
    train_prompts: int = 60
    heldout_prompts: int = 12


def image_token(index: int) -> str:
    """Return the text form of a vision id (a code, the image start or the image end)."""
    return f"<|dit_token_{index}|>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the token model's tokenizer: vision ids first, then bytes, and the words of the captions."""
    start, end = image_token(IMAGE_START_ID), image_token(IMAGE_END_ID)
    return trainer.build_tokenizer(
        [*(word for scene in all_scenes() for word in scene.caption.split()), *map(str, range(10))],
        [_PAD, _GRID_BOS, _GRID_EOS, _IMAGE],
        [image_token(index) for index in range(VISION_VOCAB_SIZE)],
        bos_token=start,
        eos_token=end,
        pad_token=_PAD,
        extra_special_tokens={"image_token": _IMAGE, "grid_bos_token": _GRID_BOS, "grid_eos_token": _GRID_EOS},
    )


_GLYPH_SIZE = 16
# A message's text unchanged, and an image as its three marks, as in the released model's template.
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}" + image_token(IMAGE_START_ID) + "<|image|>" + image_token(IMAGE_END_ID) + ""
    "{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)


def build_pipeline(recipe: TinyRecipe) -> GlmImagePipeline:
    """Build the seven components with random weights from the recipe's seed.

    One large image token covers 8 x 8 pixels: twice the decoder's patch of 4 latents, and the autoencoder keeps the
    resolution. Global random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        tokenizer = build_tokenizer()
        pipeline = GlmImagePipeline(
            tokenizer=ByT5Tokenizer(),
            processor=_build_processor(tokenizer),
            text_encoder=_build_glyph_encoder(),
            vision_language_encoder=_build_autoregressive(recipe, tokenizer),
            vae=build_cell_autoencoder(
                levels=1,
                sample_size=IMAGE_PIXELS,
                latents_mean=(0.0,) * 3,
                latents_std=(recipe.latent_std,) * 3,
            ),
            transformer=_build_decoder(recipe),
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
            ),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _build_processor(tokenizer: PreTrainedTokenizerFast) -> UnitProcessor:
    image_processor = GlmImageImageProcessorPil(
        patch_size=16,
        temporal_patch_size=1,
        merge_size=1,
        min_pixels=IMAGE_PIXELS**2,
        max_pixels=16 * IMAGE_PIXELS**2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return UnitProcessor(image_processor, tokenizer, chat_template=_CHAT_TEMPLATE, unit=CELL_PIXELS)


def _autoregressive_config(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerFast) -> GlmImageConfig:
    head_size = recipe.hidden_size // recipe.heads
    # Half of each head is rotated, in pairs: a quarter of its size in frequencies, shared out to time, height, width.
    frequencies = head_size // 4
    spatial = frequencies * 3 // 8
    return GlmImageConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "vision_vocab_size": VISION_VOCAB_SIZE,
            "hidden_size": recipe.hidden_size,
            "intermediate_size": recipe.intermediate_size,
            "num_hidden_layers": recipe.layers,
            "num_attention_heads": recipe.heads,
            "num_key_value_heads": recipe.key_value_heads,
            "max_position_embeddings": 4096,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": IMAGE_END_ID,
            "initializer_range": recipe.initializer_range,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": recipe.rope_theta,
                "partial_rotary_factor": 0.5,
                "mrope_section": [frequencies - 2 * spatial, spatial, spatial],
            },
        },
        # The vision tower reads source images of image-to-image, which the tiny model is not trained for.
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "image_size": IMAGE_PIXELS,
            "patch_size": 16,
            "intermediate_size": 32,
        },
        vq_config={"embed_dim": 16, "num_embeddings": CODEBOOK_SIZE, "latent_channels": 32},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        image_start_token_id=IMAGE_START_ID,
        image_end_token_id=IMAGE_END_ID,
    )


def _build_autoregressive(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerFast) -> GlmImageForConditionalGeneration:
    model = GlmImageForConditionalGeneration(_autoregressive_config(recipe, tokenizer))
    generation = model.generation_config
    generation.do_sample, generation.temperature, generation.top_p = True, 0.9, 0.75
    generation.eos_token_id, generation.pad_token_id = IMAGE_END_ID, tokenizer.pad_token_id
    # An end token inside a grid would leave the pipeline with too few tokens to reshape, and the decoder has no
    # embedding for the other ids from the codebook's size on.
    generation.suppress_tokens = list(range(CODEBOOK_SIZE, VISION_VOCAB_SIZE))
    return model.eval()


def _build_glyph_encoder() -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(ByT5Tokenizer()),
        d_model=_GLYPH_SIZE,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    return T5EncoderModel(config).eval()


def _build_decoder(recipe: TinyRecipe) -> GlmImageTransformer2DModel:
    return GlmImageTransformer2DModel(
        patch_size=CELL_PIXELS // 2,
        in_channels=3,
        out_channels=3,
        num_layers=recipe.decoder_layers,
        attention_head_dim=recipe.decoder_size // recipe.decoder_heads,
        num_attention_heads=recipe.decoder_heads,
        text_embed_dim=_GLYPH_SIZE,
        time_embed_dim=recipe.decoder_size,
        condition_dim=16,
        prior_vq_quantizer_codebook_size=CODEBOOK_SIZE,
    ).eval()


LIBRARIES = ("torch", "transformers", "diffusers", "tokenizers", "numpy")
"""Libraries whose versions affect the result."""


def save_tiny_model(pipeline: GlmImagePipeline, folder: Path) -> None:
    """Save the seven components; `GlmImagePipeline.from_pretrained` loads them without this project.

    It needs `trust_remote_code=True`: transformers' own processor assumes tokens of 32 pixels, so the folder has one.
    """
    # The name of the file in the component's folder, not of the module that the class has here.
    pipeline.register_to_config(processor=("processor", UnitProcessor.__name__))
    pipeline.save_pretrained(folder)
    # Where a model was loaded from, on the machine that trained it further, is in none of its files.
    for file in folder.rglob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
