"""Both trainings learn, repeat to the bit, and leave alone what they should."""

import math

import torch
from torch import nn

from data.codebook import CODEBOOK_SIZE
from data.tiny_glm_image import TinyRecipe, build_pipeline, train_autoregressive, train_decoder
from data.tiny_glm_image.decoder import _draw_tokens

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


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(before: dict[str, torch.Tensor], module: nn.Module) -> set[str]:
    return {name for name, value in module.state_dict().items() if not torch.equal(before[name], value)}


def test_autoregressive_training_learns_and_repeats() -> None:
    first, second = build_pipeline(SMALL), build_pipeline(SMALL)
    model = first.vision_language_encoder
    before, decoder_before = snapshot(model), snapshot(first.transformer)
    losses: list[float] = []
    metrics = train_autoregressive(first, SMALL, lambda step, steps, loss: losses.append(loss))
    assert len(losses) == 25
    # From a uniform guess over the head to better than one over the colours that images have.
    assert losses[0] > math.log(CODEBOOK_SIZE) - 0.5
    assert metrics.final_loss < math.log(10)
    assert not any(".visual." in name or ".vqmodel." in name for name in changed(before, model))
    assert not changed(decoder_before, first.transformer)
    assert not model.training
    assert train_autoregressive(second, SMALL) == metrics
    assert not changed(snapshot(model), second.vision_language_encoder)


def test_decoder_training_learns_and_repeats() -> None:
    first, second = build_pipeline(SMALL), build_pipeline(SMALL)
    before = snapshot(first.vision_language_encoder)
    losses: list[float] = []
    metrics = train_decoder(first, SMALL, lambda step, steps, loss: losses.append(loss))
    assert metrics.final_loss < 0.7 * sum(losses[:3]) / 3
    assert not changed(before, first.vision_language_encoder)
    assert not first.transformer.training
    assert train_decoder(second, SMALL) == metrics
    assert not changed(snapshot(first.transformer), second.transformer)


def test_decoder_sees_images_and_grids_with_random_codes() -> None:
    corpus = torch.full((5, 64), 3)
    tokens = _draw_tokens(corpus, 400, torch.Generator().manual_seed(0))
    untouched = (tokens == 3).all(1)
    assert untouched[::4].all()
    replaced = (tokens != 3).float().mean(1)
    # Each other grid has a share of random codes that is uniform in [0, 1].
    mixed = replaced.view(-1, 4)[:, 1:]
    assert abs(mixed.mean().item() - 0.5) < 0.06
    assert int(tokens.max()) == CODEBOOK_SIZE - 1
