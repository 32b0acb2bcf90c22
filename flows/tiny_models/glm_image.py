"""Make the shipped tiny GLM-Image again from its recipe: token model, decoder, files, measurements, prompt files.

`python -m flows.tiny_models.glm_image`; the same recipe gives the same weights on the same machine.
"""

import time
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import GlmImagePipeline
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from data.shapes import HELDOUT_FILE, TRAIN_FILE, choose_scenes, split_scenes, write_prompt_file
from data.tiny_glm_image import (
    LIBRARIES,
    AutoregressiveMetrics,
    TinyRecipe,
    build_pipeline,
    evaluate_tiny_model,
    save_tiny_model,
    train_autoregressive,
    train_decoder,
)
from data.training import write_recipe
from flows.terminal.progress import training_progress
from flows.tiny_models import DATA, replace_folder
from tasks.progress import progress_of

MODEL = DATA / "models" / "tiny-glm-image"
TEMPERATURES = (1.0, 0.7)


@task(name="train token model", cache_policy=NO_CACHE)
def train_token_model(pipeline: GlmImagePipeline, recipe: TinyRecipe) -> AutoregressiveMetrics:
    """Train with cross-entropy on the tokens of captioned images; changes the pipeline in place."""
    report_progress = progress_of("train token model", recipe.autoregressive_steps)
    return train_autoregressive(pipeline, recipe, lambda step, steps, loss: report_progress(step))


@task(name="train decoder", cache_policy=NO_CACHE)
def train_image_decoder(pipeline: GlmImagePipeline, recipe: TinyRecipe) -> float:
    """Train with flow matching from tokens to pixels; changes the pipeline in place."""
    report_progress = progress_of("train decoder", recipe.decoder_steps)
    return train_decoder(pipeline, recipe, lambda step, steps, loss: report_progress(step))


@task(name="measure and save", cache_policy=NO_CACHE)
def measure_and_save(pipeline: GlmImagePipeline, recipe: TinyRecipe, measured: dict[str, object], folder: Path) -> None:
    """Save, load again as a user would, measure on held-out captions, and write the recipe next to it."""
    _, unseen = split_scenes(recipe.seed, recipe.heldout_fraction)
    save_tiny_model(pipeline, folder)
    reports = [
        {"temperature": warm, **asdict(evaluate_tiny_model(folder, unseen, temperature=warm))} for warm in TEMPERATURES
    ]
    write_recipe(folder, recipe, {**measured, "heldout": reports}, libraries=LIBRARIES)


@task(name="write prompt files", cache_policy=NO_CACHE)
def write_prompt_files(recipe: TinyRecipe) -> None:
    """Write prompts and target images for training with rewards; the model has never seen the held-out ones."""
    seen, unseen = split_scenes(recipe.seed, recipe.heldout_fraction)
    for name, scenes, count in (
        (TRAIN_FILE, seen, recipe.train_prompts),
        (HELDOUT_FILE, unseen, recipe.heldout_prompts),
    ):
        write_prompt_file(choose_scenes(scenes, count, recipe.seed), DATA / "prompts" / name, DATA / "targets")


@flow(name="tiny model", validate_parameters=False)
def make_tiny_model(recipe: TinyRecipe, folder: Path) -> None:
    """Build, train, save, measure. The previous model is replaced once the new one is complete."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    pipeline = build_pipeline(recipe)
    token_model = train_token_model(pipeline, recipe)
    decoder = train_image_decoder(pipeline, recipe)
    measured: dict[str, object] = {
        "train_seconds": round(time.perf_counter() - started),
        "token_model": asdict(token_model),
        "decoder": {"final_loss": decoder},
    }
    replace_folder(folder, lambda fresh: measure_and_save(pipeline, recipe, measured, fresh))
    write_prompt_files(recipe)


if __name__ == "__main__":
    with training_progress():
        make_tiny_model(TinyRecipe(), MODEL)
