"""Builds a tiny GLM-Image pipeline from the stock transformers and diffusers classes."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImagePipeline, GlmImageTransformer2DModel
from transformers import (
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageProcessor,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

from data.codebook import CODEBOOK_SIZE
from data.shapes import CELL_PIXELS, IMAGE_PIXELS
from data.tiny_glm_image.recipe import TinyRecipe
from data.tiny_glm_image.tokenizer import (
    IMAGE_END_ID,
    IMAGE_START_ID,
    VISION_VOCAB_SIZE,
    build_tokenizer,
    image_token,
)
from data.tiny_glm_image.vae import build_identity_vae

_GLYPH_SIZE = 16
# A message's text as it stands, and an image as its three marks, as the released model's template prints them.
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}" + image_token(IMAGE_START_ID) + "<|image|>" + image_token(IMAGE_END_ID) + ""
    "{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)


def build_pipeline(recipe: TinyRecipe) -> GlmImagePipeline:
    """Builds the seven components with fresh weights drawn from the recipe's seed.

    One large image token covers 8 x 8 pixels: twice the decoder's patch of 4 latents, and the autoencoder keeps the
    resolution. Global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        tokenizer = build_tokenizer()
        pipeline = GlmImagePipeline(
            tokenizer=ByT5Tokenizer(),
            processor=_build_processor(tokenizer),
            text_encoder=_build_glyph_encoder(),
            vision_language_encoder=_build_autoregressive(recipe, tokenizer),
            vae=build_identity_vae(recipe.latent_std, IMAGE_PIXELS),
            transformer=_build_decoder(recipe),
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
            ),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _build_processor(tokenizer: PreTrainedTokenizerFast) -> GlmImageProcessor:
    image_processor = GlmImageImageProcessorPil(
        patch_size=16,
        temporal_patch_size=1,
        merge_size=1,
        min_pixels=IMAGE_PIXELS**2,
        max_pixels=16 * IMAGE_PIXELS**2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return GlmImageProcessor(image_processor=image_processor, tokenizer=tokenizer, chat_template=_CHAT_TEMPLATE)


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
