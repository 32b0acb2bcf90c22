"""The recipe of the tiny GLM-Image: tokenizer, parts, imperfect corpus, both trainings, and the evaluation's reader."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from data.shapes import (
    SPRITES,
    Scene,
    all_scenes,
    cells_to_image,
    draw,
    draw_cells,
    sprite_origin,
)
from data.tiny_glm_image import TinyRecipe, build_pipeline, save_tiny_model, train_autoregressive, train_decoder
from data.tiny_glm_image.components import build_identity_vae, build_tokenizer
from data.tiny_glm_image.evaluation import read_scene
from data.training import SupervisedOptimizer
from grpo_core.errors import NonFiniteError

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


def test_latents_of_the_identity_autoencoder_are_pixels() -> None:
    vae = build_identity_vae(latent_std=0.2, sample_size=64)
    pixels = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    # A group norm is hardest to pin where an image is flat.
    pixels[3] = 1.0
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
        sampled = posterior.sample(torch.Generator().manual_seed(0))
        for found in (posterior.mode(), sampled, vae.decode(posterior.mode()).sample):
            torch.testing.assert_close(found, pixels, atol=1e-4, rtol=0)


def test_a_saved_pipeline_has_the_seeds_weights_and_loads_with_diffusers_alone(tmp_path: Path) -> None:
    pipeline = build_pipeline(SMALL)
    save_tiny_model(pipeline, tmp_path)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = build_pipeline(SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    for other in (again, GlmImagePipeline.from_pretrained(tmp_path)):
        for part in ("vision_language_encoder", "transformer", "vae", "text_encoder"):
            assert not changed(getattr(pipeline, part).state_dict(), getattr(other, part))
        text = "a red 圆 “hi” 🙂"
        assert other.processor.tokenizer(text).input_ids == pipeline.processor.tokenizer(text).input_ids


# --- the corpus


# --- the trainings


def test_first_step_by_hand_and_a_loss_that_is_not_finite_changes_nothing() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = SupervisedOptimizer([weight], learning_rate=0.1, steps=100)
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFiniteError):
            optimizer.step((weight * bad).sum())
        assert weight.tolist() == [1.0, -2.0]
    assert optimizer.step((weight * torch.tensor([3.0, -0.5])).sum()) == pytest.approx(4.0)
    # Decoupled decay of 0.01 and a step of 0.2 * 0.1 against the gradient's sign.
    expected = torch.tensor([1.0, -2.0]) * (1 - 0.02 * 0.01) - 0.02 * torch.tensor([1.0, -1.0])
    torch.testing.assert_close(weight.detach(), expected, atol=1e-6, rtol=0)


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


# --- the evaluation


@pytest.mark.parametrize("scene", all_scenes()[::37])
def test_a_noisy_image_is_read_as_its_scene(scene: Scene) -> None:
    noise = np.random.default_rng(0).normal(scale=12, size=(64, 64, 3))
    noisy = np.clip(np.asarray(draw(scene)) + noise, 0, 255).astype(np.uint8)
    assert read_scene(Image.fromarray(noisy)) == scene


@pytest.mark.parametrize("shape", SPRITES)
def test_one_cell_off_is_still_the_same_scene(shape: str) -> None:
    scene = Scene("red", shape, "bottom left", "white")
    row, column = sprite_origin(shape, "bottom left")
    assert read_scene(cells_to_image(draw_cells(scene, origin=(row - 1, column)))) == scene
