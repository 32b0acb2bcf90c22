"""Training of the tiny diffusion transformer: flow matching from image tokens to flat cells."""

from dataclasses import dataclass

import torch
from diffusers import GlmImagePipeline
from torch import Tensor
from torch.nn import functional as F

from data.codebook import CODEBOOK_SIZE, PREVIEW_GRID, decode_tokens
from data.shapes import CELL_PIXELS, GRID, IMAGE_PIXELS, split_scenes
from data.tiny_glm_image.corpus import draw_corpus
from data.tiny_glm_image.optimization import ProgressCallback, SupervisedOptimizer
from data.tiny_glm_image.recipe import TinyRecipe

# Quoted texts, as examples of glyph embeddings; most prompts quote nothing.
_GLYPH_TEXTS = (
    "",
    "",
    "",
    "A",
    "hello",
    "GRPO 2026",
    "New Life Cafe",
    "open 24 hours",
    "你好世界",
    "Sale: 50% off today!",
)
_TIME_SHIFT = 3.0
_PURE_NOISE = 0.25
# Without tokens an image can only be guessed, and that loss would drown the small ones that make cells flat.
_DROPPED_WEIGHT = 0.3


@dataclass(frozen=True)
class DecoderMetrics:
    """The loss that the flow matching reached.

    Attributes:
        final_loss: weighted mean squared error of the velocity over the last twentieth of the steps, in latent units.
    """

    final_loss: float


def train_decoder(
    pipeline: GlmImagePipeline, recipe: TinyRecipe, on_step: ProgressCallback | None = None
) -> DecoderMetrics:
    """Train `pipeline.transformer` in place to draw each image token as a flat cell of its colour.

    The straight path x_t = (1 - t) x_0 + t noise and its velocity noise - x_0 are those of Lipman et al. 2023, "Flow
    Matching for Generative Modeling", section 4.1, example II, with time reversed as in diffusers; t is logit-normal
    as in Esser et al. 2024, "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", section 3.1.

    Args:
        pipeline: from :func:`data.tiny_glm_image.components.build_pipeline`.
        recipe: steps, batch, learning rate and the corpus.
        on_step: called after every step.

    Raises:
        NonFiniteError: the loss is NaN or infinite.
    """
    model = pipeline.transformer
    train_scenes, _ = split_scenes(recipe.seed, recipe.heldout_fraction)
    large_tokens = draw_corpus(train_scenes, recipe).tokens[:, PREVIEW_GRID**2 :]
    with torch.no_grad():
        glyphs = [pipeline._get_glyph_embeds([f'"{text}"']) for text in _GLYPH_TEXTS]
    optimizer = SupervisedOptimizer(model.parameters(), recipe.decoder_learning_rate, recipe.decoder_steps)
    generator = torch.Generator().manual_seed(recipe.seed)
    losses = []
    model.train()
    for step in range(recipe.decoder_steps):
        tokens = _draw_tokens(large_tokens, recipe.decoder_batch, generator)
        glyph = glyphs[int(torch.randint(len(glyphs), (1,), generator=generator))]
        losses.append(optimizer.step(_flow_matching_loss(pipeline, tokens, glyph, recipe, generator)))
        if on_step is not None:
            on_step(step + 1, recipe.decoder_steps, losses[-1])
    model.eval()
    tail = losses[-max(1, len(losses) // 20) :]
    return DecoderMetrics(sum(tail) / len(tail))


def _draw_tokens(large_tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw corpus images, and as many grids in which a random share of the cells has random codes.

    A policy in training samples grids that are not in the corpus, and the decoder has to render those too.
    """
    rows = torch.randint(len(large_tokens), (count,), generator=generator)
    tokens = large_tokens[rows]
    share = torch.rand(count, 1, generator=generator) * (torch.arange(count) % 4 > 0).unsqueeze(1)
    replaced = torch.rand(tokens.shape, generator=generator) < share
    return torch.where(replaced, torch.randint(CODEBOOK_SIZE, tokens.shape, generator=generator), tokens)


def _draw_times(count: int, generator: torch.Generator) -> Tensor:
    """Draw logit-normal times, shifted towards noise, a quarter of them pure noise.

    Latents are large against the noise, so the image shows through it except near time 1, where the
    decoder learns to read the tokens.
    """
    time = torch.sigmoid(torch.randn(count, generator=generator))
    shifted = _TIME_SHIFT * time / (1 + (_TIME_SHIFT - 1) * time)
    return torch.where(torch.rand(count, generator=generator) < _PURE_NOISE, 1.0, shifted)


def _flow_matching_loss(
    pipeline: GlmImagePipeline, tokens: Tensor, glyph: Tensor, recipe: TinyRecipe, generator: torch.Generator
) -> Tensor:
    count = len(tokens)
    cells = decode_tokens(tokens) / recipe.latent_std
    clean = cells.repeat_interleave(CELL_PIXELS, 2).repeat_interleave(CELL_PIXELS, 3)
    noise = torch.randn(clean.shape, generator=generator)
    time = _draw_times(count, generator)
    mixed = torch.lerp(clean, noise, time.view(-1, 1, 1, 1))
    # Each large token covers two by two positions of the decoder.
    prior = tokens.view(-1, GRID, GRID).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
    dropped = torch.rand(count, 1, generator=generator) < recipe.prior_drop_probability
    velocity = pipeline.transformer(
        hidden_states=mixed,
        encoder_hidden_states=glyph.expand(count, -1, -1),
        prior_token_id=prior,
        prior_token_drop=dropped.expand(-1, prior.shape[1]),
        # The pipeline passes its scheduler's timestep minus one.
        timestep=time * pipeline.scheduler.config.num_train_timesteps - 1,
        target_size=torch.full((count, 2), float(IMAGE_PIXELS)),
        crop_coords=torch.zeros(count, 2),
        return_dict=False,
    )[0]
    row_loss = F.mse_loss(velocity, noise - clean, reduction="none").mean(dim=(1, 2, 3))
    return (row_loss * torch.where(dropped.squeeze(1), _DROPPED_WEIGHT, 1.0)).mean()
