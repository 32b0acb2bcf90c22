"""The tiny GLM-Image: tokenizer, parts, both trainings, and the shipped model."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from data.shapes import CODEBOOK_SIZE, decode_tokens, split_scenes
from data.tiny_glm_image.components import TinyRecipe, build_pipeline, build_tokenizer, save_tiny_model
from data.tiny_glm_image.training import evaluate_tiny_model, train_autoregressive, train_decoder
from tests.tiny_policies import MODEL

SMALL = TinyRecipe(
    hidden_size=64,
    layers=1,
    decoder_size=32,
    corpus_size=64,
    autoregressive_steps=25,
    autoregressive_batch=8,
    decoder_steps=25,
    decoder_batch=4,
    latent_std=0.5,
)
TOKENIZER = build_tokenizer()


@given(st.text(max_size=40).filter(lambda text: "<" not in text))
def test_any_text_round_trips_through_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


def test_a_saved_pipeline_has_the_seeds_weights_and_loads_with_diffusers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    pipeline = build_pipeline(SMALL)
    save_tiny_model(pipeline, tmp_path)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = build_pipeline(SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    for other in (again, GlmImagePipeline.from_pretrained(tmp_path, trust_remote_code=True)):
        for part in ("vision_language_encoder", "transformer", "vae", "text_encoder"):
            assert not changed(getattr(pipeline, part).state_dict(), getattr(other, part))
        text = "a red 圆 “hi” 🙂"
        assert other.processor.tokenizer(text).input_ids == pipeline.processor.tokenizer(text).input_ids
        assert other.processor.unit == 8


# --- the trainings


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(before: dict[str, torch.Tensor], module: nn.Module) -> set[str]:
    return {name for name, value in module.state_dict().items() if not torch.equal(before[name], value)}


def test_both_trainings_learn_repeat_to_the_bit_and_change_their_part_alone() -> None:
    first, second = build_pipeline(SMALL), build_pipeline(SMALL)
    model, decoder = first.vision_language_encoder, first.transformer
    model_before, decoder_before = snapshot(model), snapshot(decoder)
    metrics = train_autoregressive(first, SMALL)
    # From a uniform guess over the codes to better than one over the colours that images have.
    assert metrics.final_loss < math.log(10)
    assert not any(".visual." in name or ".vqmodel." in name for name in changed(model_before, model))
    assert not changed(decoder_before, decoder)
    model_before, losses = snapshot(model), list[float]()
    decoded = train_decoder(first, SMALL, lambda step, steps, loss: losses.append(loss))
    assert decoded < 0.7 * sum(losses[:3]) / 3
    assert not changed(model_before, model)
    assert not model.training
    assert not decoder.training
    assert (train_autoregressive(second, SMALL), train_decoder(second, SMALL)) == (metrics, decoded)
    assert not changed(snapshot(model), second.vision_language_encoder)
    assert not changed(snapshot(decoder), second.transformer)


# --- the shipped model


def test_heldout_captions_are_understood_and_there_is_room_to_improve() -> None:
    recipe = TinyRecipe()
    _, heldout = split_scenes(recipe.seed, recipe.heldout_fraction)
    report = evaluate_tiny_model(MODEL, heldout[::5], temperature=1.0)
    assert report.color >= 0.8
    assert report.background >= 0.9
    assert report.position >= 0.8
    assert report.shape >= 0.5
    assert 0.5 <= report.ssim <= 0.85
    assert report.ssim_group_std >= 0.05


@pytest.mark.parametrize(
    ("guidance_scale", "steps", "prompt"),
    [(1.0, 4, 'a sign that says "Hello World"'), (1.0, 8, "a red circle"), (1.5, 4, "a red circle")],
)
def test_decoder_draws_any_tokens_as_flat_cells(
    shipped_pipeline: GlmImagePipeline, guidance_scale: float, steps: int, prompt: str
) -> None:
    tokens = torch.randint(CODEBOOK_SIZE, (4, 64), generator=torch.Generator().manual_seed(0))
    images = shipped_pipeline(
        [prompt] * 4,
        height=64,
        width=64,
        prior_token_ids=tokens.view(-1, 8, 8).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1),
        generator=[torch.Generator().manual_seed(seed) for seed in range(4)],
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
    ).images
    decoded = np.stack([np.asarray(image, dtype=np.float32) for image in images]) / 255
    cells = (decode_tokens(tokens).permute(0, 2, 3, 1).numpy() + 1) / 2
    assert np.square(decoded - cells.repeat(8, axis=1).repeat(8, axis=2)).mean() < 0.01
