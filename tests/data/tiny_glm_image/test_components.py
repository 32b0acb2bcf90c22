"""The pipeline is built of stock classes with the released model's layout, and survives saving."""

from pathlib import Path

import pytest
import torch
from diffusers import GlmImagePipeline
from transformers import GlmImageForConditionalGeneration, GlmImageProcessor

from data.codebook import CODEBOOK_SIZE
from data.shapes import Scene
from data.tiny_glm_image import TinyRecipe, build_pipeline, save_tiny_model
from data.tiny_glm_image.autoregressive import encode_scenes
from data.tiny_glm_image.components import IMAGE_END_ID, IMAGE_START_ID
from grpo_core.policies.glm_image.loading import load_pipeline, pixel_unit

SMALL = TinyRecipe(hidden_size=64, layers=1, decoder_size=32)


@pytest.fixture(scope="module")
def pipeline() -> GlmImagePipeline:
    return build_pipeline(SMALL)


def weights(pipeline: GlmImagePipeline) -> dict[str, torch.Tensor]:
    parts = ("vision_language_encoder", "transformer", "vae", "text_encoder")
    return {f"{part}.{name}": value for part in parts for name, value in getattr(pipeline, part).state_dict().items()}


def test_same_seed_same_weights_and_the_global_generator_is_left_alone(pipeline: GlmImagePipeline) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = build_pipeline(SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(pipeline).items())


def test_a_large_token_is_eight_pixels_and_prompts_carry_both_grids(pipeline: GlmImagePipeline) -> None:
    assert pixel_unit(pipeline) == 8
    encoded = encode_scenes(pipeline, [Scene("red", "circle", "top left", "white")])
    text = pipeline.processor.tokenizer.decode(encoded.input_ids[0])
    expected = "a red circle at the top left on a white background<sop>8 8<eop><sop>4 4<eop>"
    assert text == expected + f"<|dit_token_{IMAGE_START_ID}|>"
    # Sixteen preview tokens, sixty-four large ones and the end slot follow the prompt.
    assert encoded.position_ids.shape[-1] == encoded.length + 16 + 64 + 1


def test_generation_settings_are_the_released_ones_and_only_codes_can_be_drawn(pipeline: GlmImagePipeline) -> None:
    generation = pipeline.vision_language_encoder.generation_config
    assert (generation.do_sample, generation.temperature, generation.top_p) == (True, 0.9, 0.75)
    assert generation.eos_token_id == IMAGE_END_ID
    head = pipeline.vision_language_encoder.config.text_config.vision_vocab_size
    assert sorted(set(range(head)) - set(generation.suppress_tokens)) == list(range(CODEBOOK_SIZE))


def test_a_saved_pipeline_loads_with_diffusers_alone_and_with_the_same_weights(
    pipeline: GlmImagePipeline, tmp_path: Path
) -> None:
    save_tiny_model(pipeline, tmp_path)
    loaded = GlmImagePipeline.from_pretrained(tmp_path)
    assert type(loaded.processor) is GlmImageProcessor
    assert type(loaded.vision_language_encoder) is GlmImageForConditionalGeneration
    saved = weights(pipeline)
    assert all(torch.equal(value, saved[name]) for name, value in weights(loaded).items())
    text = "a red 圆 “hi” 🙂"
    assert loaded.processor.tokenizer(text).input_ids == pipeline.processor.tokenizer(text).input_ids
    ours = load_pipeline(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert ours.processor.unit == 8
