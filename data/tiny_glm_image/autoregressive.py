"""Supervised training of the tiny autoregressive model: cross-entropy on the tokens of both grids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import GlmImagePipeline
from torch import Tensor

from data.codebook import CODEBOOK_SIZE, PREVIEW_GRID, encode_cells
from data.shapes import IMAGE_PIXELS, Scene, draw_cells, split_scenes
from data.tiny_glm_image.corpus import draw_corpus
from data.tiny_glm_image.optimization import ProgressCallback, SupervisedOptimizer
from data.tiny_glm_image.recipe import TinyRecipe
from grpo_core.policies.glm_image.loading import pixel_unit
from grpo_core.policies.glm_image.prompts import EncodedPrompts, UnitProcessor, encode_prompts
from grpo_core.policies.glm_image.scoring import score_tokens


@dataclass(frozen=True)
class AutoregressiveMetrics:
    """The losses that the supervised training reached.

    Attributes:
        final_loss: mean cross-entropy over the last twentieth of the steps, nats per token.
        heldout_preview_loss: cross-entropy of clean held-out images' preview tokens, nats per token.
        heldout_large_loss: the same for the large grid's tokens.
    """

    final_loss: float
    heldout_preview_loss: float
    heldout_large_loss: float


def encode_scenes(pipeline: GlmImagePipeline, scenes: Sequence[Scene]) -> EncodedPrompts:
    """Encode the scenes' captions for the autoregressive model, one row per scene."""
    stock = pipeline.processor
    processor = UnitProcessor(stock.image_processor, stock.tokenizer, chat_template=stock.chat_template)
    processor.unit = pixel_unit(pipeline)
    captions = [scene.caption for scene in scenes]
    return encode_prompts(pipeline.vision_language_encoder.model, processor, captions, IMAGE_PIXELS, IMAGE_PIXELS)


def token_losses(pipeline: GlmImagePipeline, encoded: EncodedPrompts, tokens: Tensor) -> Tensor:
    """Compute the negative log-likelihood of the given tokens, float [images, tokens], in nats."""
    everything = torch.ones_like(tokens, dtype=torch.bool)
    scored = score_tokens(
        pipeline.vision_language_encoder,
        encoded,
        tokens,
        everything,
        vocabulary=CODEBOOK_SIZE,
        entropy=False,
        temperature=1.0,
    )
    return -scored.logprobs


def train_autoregressive(
    pipeline: GlmImagePipeline, recipe: TinyRecipe, on_step: ProgressCallback | None = None
) -> AutoregressiveMetrics:
    """Train `pipeline.vision_language_encoder` in place on the recipe's corpus of training captions.

    Args:
        pipeline: from :func:`data.tiny_glm_image.components.build_pipeline`.
        recipe: steps, batch, learning rate and the corpus.
        on_step: called after every step.

    Raises:
        NonFiniteError: the loss is NaN or infinite.
    """
    model = pipeline.vision_language_encoder
    train_scenes, heldout_scenes = split_scenes(recipe.seed, recipe.heldout_fraction)
    corpus = draw_corpus(train_scenes, recipe)
    encoded = encode_scenes(pipeline, train_scenes)
    # The vision tower and the quantizer read source images, which are not used here.
    trained = [p for name, p in model.named_parameters() if "visual" not in name and "vqmodel" not in name]
    optimizer = SupervisedOptimizer(trained, recipe.autoregressive_learning_rate, recipe.autoregressive_steps)
    generator = torch.Generator().manual_seed(recipe.seed)
    losses = []
    model.train()
    for step in range(recipe.autoregressive_steps):
        rows = torch.randint(recipe.corpus_size, (recipe.autoregressive_batch,), generator=generator)
        loss = token_losses(pipeline, encoded.select(corpus.scene_index[rows]), corpus.tokens[rows]).mean()
        losses.append(optimizer.step(loss))
        if on_step is not None:
            on_step(step + 1, recipe.autoregressive_steps, losses[-1])
    model.eval()
    tail = losses[-max(1, len(losses) // 20) :]
    preview, large = _heldout_losses(pipeline, heldout_scenes)
    return AutoregressiveMetrics(sum(tail) / len(tail), preview, large)


@torch.no_grad()
def _heldout_losses(pipeline: GlmImagePipeline, scenes: Sequence[Scene]) -> tuple[float, float]:
    tokens = encode_cells(np.stack([draw_cells(scene) for scene in scenes]))
    losses = token_losses(pipeline, encode_scenes(pipeline, scenes), tokens)
    preview, large = losses.split([PREVIEW_GRID**2, tokens.shape[1] - PREVIEW_GRID**2], dim=1)
    return preview.mean().item(), large.mean().item()
