"""Flow matching of the tiny SD3's transformer on imperfect images, and what it draws of held-out captions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor
from torch.nn import functional as F

from data.image_quality import ImageQuality, measure_images
from data.imperfect_drawings import Mistakes, draw_imperfect_corpus
from data.shapes import IMAGE_PIXELS, Scene, split_scenes
from data.tiny_sd3.components import TinySd3Recipe
from data.training import ProgressCallback, train
from grpo_core.seeds import derive_seed

GROUP_SIZE = 4
"""Images of a caption when a saved model is measured."""


@dataclass(frozen=True)
class PromptEmbeddings:
    """What the transformer gets of prompts: states [prompts, length, size] and pooled [prompts, size]."""

    states: Tensor
    pooled: Tensor

    def select(self, rows: Tensor) -> "PromptEmbeddings":
        """Return these rows."""
        return PromptEmbeddings(self.states[rows], self.pooled[rows])


@torch.no_grad()
def encode_prompts(pipeline: StableDiffusion3Pipeline, prompts: list[str], length: int) -> PromptEmbeddings:
    """Encode prompts as the pipeline does."""
    states, _, pooled, _ = pipeline.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=length
    )
    return PromptEmbeddings(states, pooled)


def train_transformer(
    pipeline: StableDiffusion3Pipeline, recipe: TinySd3Recipe, on_step: ProgressCallback | None = None
) -> float:
    """Train `pipeline.transformer` in place on the recipe's corpus of training captions.

    The straight path x_t = (1 - t) x_0 + t noise, its velocity noise - x_0 and logit-normal t are those of Esser et al.
    2024, "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", section 3.1; t is shifted as the
    scheduler shifts its noise levels, section 5.3.2.

    Returns:
        Mean squared error of the velocity over the last twentieth of the steps, in latent units.

    Raises:
        NonFiniteError: the loss is NaN or infinite.
    """
    scenes, _ = split_scenes(recipe.seed, recipe.heldout_fraction)
    mistakes = Mistakes(recipe.slip_probability, recipe.confusion_probability, recipe.speckle_probability)
    described, cells = draw_imperfect_corpus(scenes, recipe.corpus_size, mistakes, recipe.seed)
    latents = _to_latents(cells, recipe)
    # The last one is for dropped prompts.
    prompts = encode_prompts(pipeline, [*(scene.caption for scene in scenes), ""], recipe.text_length)
    captions = torch.from_numpy(described)
    generator = torch.Generator().manual_seed(recipe.seed)

    def loss() -> Tensor:
        rows = torch.randint(recipe.corpus_size, (recipe.batch,), generator=generator)
        dropped = torch.rand(recipe.batch, generator=generator) < recipe.prompt_drop_probability
        told = torch.where(dropped, len(scenes), captions[rows])
        return _flow_matching_loss(pipeline, latents[rows], prompts.select(told), generator)

    parameters = pipeline.transformer.parameters()
    return train(pipeline.transformer, parameters, recipe.learning_rate, recipe.steps, loss, on_step)


def _to_latents(cells: np.ndarray, recipe: TinySd3Recipe) -> Tensor:
    colors = torch.from_numpy(cells).float().permute(0, 3, 1, 2) / 127.5 - 1
    return colors / recipe.latent_std


def _flow_matching_loss(
    pipeline: StableDiffusion3Pipeline, clean: Tensor, prompts: PromptEmbeddings, generator: torch.Generator
) -> Tensor:
    noise = torch.randn(clean.shape, generator=generator)
    shift = pipeline.scheduler.config.shift
    time = torch.sigmoid(torch.randn(len(clean), generator=generator))
    time = shift * time / (1 + (shift - 1) * time)
    velocity = pipeline.transformer(
        hidden_states=torch.lerp(clean, noise, time.view(-1, 1, 1, 1)),
        encoder_hidden_states=prompts.states,
        pooled_projections=prompts.pooled,
        timestep=time * pipeline.scheduler.config.num_train_timesteps,
        return_dict=False,
    )[0]
    return F.mse_loss(velocity, noise - clean)


def evaluate_tiny_sd3(
    folder: Path, scenes: Sequence[Scene], num_inference_steps: int, guidance_scale: float
) -> ImageQuality:
    """Sample and measure images for each scene's caption from a saved model, with diffusers alone.

    Args:
        scenes: usually the held-out ones of :func:`data.shapes.split_scenes`.
    """
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, trust_remote_code=False)
    pipeline.set_progress_bar_config(disable=True)
    wanted = [scene for scene in scenes for _ in range(GROUP_SIZE)]
    images = pipeline(
        [scene.caption for scene in wanted],
        generator=[torch.Generator().manual_seed(derive_seed(0, "noise", row)) for row in range(len(wanted))],
        height=IMAGE_PIXELS,
        width=IMAGE_PIXELS,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        # The transformer has seen texts of this length alone.
        max_sequence_length=pipeline.tokenizer.model_max_length,
    ).images
    return measure_images(images, wanted, group_size=GROUP_SIZE)
