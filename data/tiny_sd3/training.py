"""Flow matching of the tiny SD3's transformer on imperfect images."""

from dataclasses import dataclass

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor
from torch.nn import functional as F

from data.imperfect_drawings import Mistakes, draw_imperfect_corpus
from data.shapes import split_scenes
from data.tiny_sd3.recipe import TinySd3Recipe
from data.training import ProgressCallback, train


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
