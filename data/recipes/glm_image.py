"""The tiny GLM-Image: the token model on imperfect images, flow matching of the decoder, held-out captions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import GlmImagePipeline
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch import Tensor
from torch.nn import functional as F

from data.recipes.glm_image_parts import LIBRARIES, TinyRecipe, build_pipeline, save_tiny_model
from data.recipes.shapes import (
    CELL_PIXELS,
    CODEBOOK_SIZE,
    GRID,
    HELDOUT_FILE,
    IMAGE_PIXELS,
    PREVIEW_GRID,
    TRAIN_FILE,
    Scene,
    choose_scenes,
    decode_tokens,
    draw,
    draw_cells,
    draw_imperfect_corpus,
    encode_cells,
    split_scenes,
    write_prompt_file,
)
from data.recipes.trainer import DATA, ProgressCallback, Quality, measure, print_progress, replace_shipped, train
from grpo_core.policies.causal_lm.sampling_scoring import score_completions
from grpo_core.policies.encoded_prompts import EncodedPrompts
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.prompts import encode_prompts
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.streams import ImageSize


def draw_corpus(scenes: Sequence[Scene], recipe: TinyRecipe) -> tuple[Tensor, Tensor]:
    """Draw imperfect images: the scene of each caption, int64 [images], and tokens, int64 [images, 16 + 64]."""
    index, cells = draw_imperfect_corpus(scenes, recipe)
    return torch.from_numpy(index), encode_cells(cells)


def encode_scenes(pipeline: GlmImagePipeline, scenes: Sequence[Scene]) -> EncodedPrompts:
    """Encode the scenes' captions for the autoregressive model, one row per scene."""
    captions = [scene.caption for scene in scenes]
    size = ImageSize(IMAGE_PIXELS, IMAGE_PIXELS)
    return encode_prompts(pipeline.vision_language_encoder.model, pipeline.processor, captions, size)


def token_losses(pipeline: GlmImagePipeline, encoded: EncodedPrompts, tokens: Tensor) -> Tensor:
    """Compute the negative log-likelihood of the given tokens, float [images, tokens], in nats."""
    everything = torch.ones_like(tokens, dtype=torch.bool)
    scored = score_completions(
        pipeline.vision_language_encoder,
        encoded,
        tokens,
        everything,
        vocabulary=CODEBOOK_SIZE,
        temperature=1.0,
        support=None,
        entropy="none",
        whole_logits=False,
    )
    return -scored.logprobs


def train_autoregressive(
    pipeline: GlmImagePipeline, recipe: TinyRecipe, on_step: ProgressCallback | None = None
) -> dict[str, float]:
    """Train `pipeline.vision_language_encoder` in place on training captions; return losses in nats per token."""
    model = pipeline.vision_language_encoder
    train_scenes, heldout_scenes = split_scenes(recipe.seed, recipe.heldout_fraction)
    described, tokens = draw_corpus(train_scenes, recipe)
    encoded = encode_scenes(pipeline, train_scenes)
    # The vision tower and the quantizer read source images, which are not used here.
    trained = [p for name, p in model.named_parameters() if "visual" not in name and "vqmodel" not in name]
    generator = torch.Generator().manual_seed(recipe.seed)

    def loss() -> Tensor:
        rows = torch.randint(recipe.corpus_size, (recipe.autoregressive_batch,), generator=generator)
        return token_losses(pipeline, encoded.select(described[rows]), tokens[rows]).mean()

    final = train(model, trained, recipe.autoregressive_learning_rate, recipe.autoregressive_steps, loss, on_step)
    preview, large = _heldout_losses(pipeline, heldout_scenes)
    return {"final_loss": final, "heldout_preview_loss": preview, "heldout_large_loss": large}


@torch.no_grad()
def _heldout_losses(pipeline: GlmImagePipeline, scenes: Sequence[Scene]) -> tuple[float, float]:
    tokens = encode_cells(np.stack([draw_cells(scene) for scene in scenes]))
    losses = token_losses(pipeline, encode_scenes(pipeline, scenes), tokens)
    preview, large = losses.split([PREVIEW_GRID**2, tokens.shape[1] - PREVIEW_GRID**2], dim=1)
    return preview.mean().item(), large.mean().item()


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


def train_decoder(pipeline: GlmImagePipeline, recipe: TinyRecipe, on_step: ProgressCallback | None = None) -> float:
    """Train `pipeline.transformer` in place to draw each image token as a flat cell; return the loss of the last steps.

    The straight path x_t = (1 - t) x_0 + t noise and its velocity noise - x_0 are those of Lipman et al. 2023, "Flow
    Matching for Generative Modeling", section 4.1, example II, with time reversed as in diffusers; t is logit-normal
    as in Esser et al. 2024, "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", section 3.1.
    """
    train_scenes, _ = split_scenes(recipe.seed, recipe.heldout_fraction)
    large_tokens = draw_corpus(train_scenes, recipe)[1][:, PREVIEW_GRID**2 :]
    glyphs = glyph_embeddings(pipeline)
    generator = torch.Generator().manual_seed(recipe.seed)

    def loss() -> Tensor:
        rows = torch.randint(len(large_tokens), (recipe.decoder_batch,), generator=generator)
        tokens = scramble_tokens(large_tokens[rows], generator)
        glyph = glyphs[int(torch.randint(len(glyphs), (1,), generator=generator))]
        return flow_matching_loss(pipeline, tokens, glyph, recipe, generator)

    parameters = pipeline.transformer.parameters()
    return train(pipeline.transformer, parameters, recipe.decoder_learning_rate, recipe.decoder_steps, loss, on_step)


@torch.no_grad()
def glyph_embeddings(pipeline: GlmImagePipeline) -> list[Tensor]:
    """Embed examples of quoted texts, each float [1, ids, width]."""
    return [pipeline._get_glyph_embeds([f'"{text}"']) for text in _GLYPH_TEXTS]


def scramble_tokens(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Keep a quarter of the images, int64 [images, 64]; of the others a random share of the cells gets random codes.

    A policy in training samples grids that are not in the corpus, and the decoder has to render those too.
    """
    count = len(tokens)
    share = torch.rand(count, 1, generator=generator) * (torch.arange(count) % 4 > 0).unsqueeze(1)
    replaced = torch.rand(tokens.shape, generator=generator) < share
    return torch.where(replaced, torch.randint(CODEBOOK_SIZE, tokens.shape, generator=generator), tokens)


def _draw_times(count: int, generator: torch.Generator) -> Tensor:
    """Draw logit-normal times, shifted towards noise; in a quarter, pure noise, the decoder has to read the tokens."""
    time = torch.sigmoid(torch.randn(count, generator=generator))
    shifted = _TIME_SHIFT * time / (1 + (_TIME_SHIFT - 1) * time)
    return torch.where(torch.rand(count, generator=generator) < _PURE_NOISE, 1.0, shifted)


def flow_matching_loss(
    pipeline: GlmImagePipeline,
    tokens: Tensor,
    glyph: Tensor,
    recipe: TinyRecipe,
    generator: torch.Generator,
    sources: GlmImageKVCache | None = None,
) -> Tensor:
    """Return the weighted mean squared error of the velocity of images, at random times, in latent units.

    Args:
        tokens: int64 [images, 64], of the large grid.
        glyph: of all images.
        sources: keys and values of a source image to read; where tokens are dropped it is read all the same.
    """
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
        kv_caches=sources,
        return_dict=False,
    )[0]
    row_loss = F.mse_loss(velocity, noise - clean, reduction="none").mean(dim=(1, 2, 3))
    return (row_loss * torch.where(dropped.squeeze(1), _DROPPED_WEIGHT, 1.0)).mean()


def measure_saved(
    folder: Path,
    prompts: Sequence[str],
    scenes: Sequence[Scene],
    temperature: float,
    sources: Sequence[Sequence[SourceImage]] | None = None,
) -> Quality:
    """Measure the R² of the images of prompts to these scenes, with the policy of training with rewards."""
    settings = GlmImageSettings(
        height=IMAGE_PIXELS, width=IMAGE_PIXELS, temperature=temperature, num_inference_steps=4, guidance_scale=1.0
    )
    policy = GlmImagePolicy.load(str(folder), settings, {"tokens": TrainingChoice(lora=None)})
    return measure(policy, prompts, "r2", sources=sources, targets=[draw(scene) for scene in scenes])


def make() -> None:
    """Make the tiny GLM-Image: token model, decoder, prompt files; it has never seen the held-out captions."""
    recipe = TinyRecipe()
    seen, unseen = split_scenes(recipe.seed, recipe.heldout_fraction)
    pipeline = build_pipeline(recipe)

    def train_both() -> dict[str, object]:
        token_model = train_autoregressive(pipeline, recipe, print_progress("train token model"))
        decoder = train_decoder(pipeline, recipe, print_progress("train decoder"))
        return {"token_model": token_model, "decoder": {"final_loss": decoder}}

    def measured(folder: Path) -> dict[str, Quality]:
        captions = [scene.caption for scene in unseen]
        return {f"temperature {warm}": measure_saved(folder, captions, unseen, warm) for warm in (1.0, 0.7)}

    replace_shipped(
        "tiny-glm-image", recipe, LIBRARIES, train_both, lambda folder: save_tiny_model(pipeline, folder), measured
    )
    for name, scenes, count in (
        (TRAIN_FILE, seen, recipe.train_prompts),
        (HELDOUT_FILE, unseen, recipe.heldout_prompts),
    ):
        write_prompt_file(choose_scenes(scenes, count, recipe.seed), DATA / "prompts" / name, DATA / "targets")
