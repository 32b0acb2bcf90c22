"""Make the shipped tiny SD3 again from its recipe: weights, files, measurements.

`python -m flows.tiny_models.sd3`; the same recipe gives the same weights on the same machine. Its prompts are those of
the tiny GLM-Image.
"""

import time
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from data.shapes import split_scenes
from data.tiny_sd3 import (
    LIBRARIES,
    TinySd3Recipe,
    build_pipeline,
    evaluate_tiny_sd3,
    save_tiny_sd3,
    train_transformer,
)
from data.training import write_recipe
from flows.terminal.progress import training_progress
from flows.tiny_models import DATA, replace_folder
from tasks.progress import progress_of

MODEL = DATA / "models" / "tiny-sd3"
STEPS, GUIDANCE_SCALES = 8, (1.0, 2.0)


@task(name="train transformer", cache_policy=NO_CACHE)
def train_diffusion_transformer(pipeline: StableDiffusion3Pipeline, recipe: TinySd3Recipe) -> float:
    """Train with flow matching from captions to images; changes the pipeline in place."""
    report_progress = progress_of("train transformer", recipe.steps)
    return train_transformer(pipeline, recipe, lambda step, steps, loss: report_progress(step))


@task(name="measure and save", cache_policy=NO_CACHE)
def measure_and_save(
    pipeline: StableDiffusion3Pipeline, recipe: TinySd3Recipe, measured: dict[str, object], folder: Path
) -> None:
    """Save, load again as a user would, measure on held-out captions, and write the recipe next to it."""
    _, unseen = split_scenes(recipe.seed, recipe.heldout_fraction)
    save_tiny_sd3(pipeline, folder)
    reports = [
        {
            "num_inference_steps": STEPS,
            "guidance_scale": scale,
            **asdict(evaluate_tiny_sd3(folder, unseen, num_inference_steps=STEPS, guidance_scale=scale)),
        }
        for scale in GUIDANCE_SCALES
    ]
    write_recipe(folder, recipe, {**measured, "heldout": reports}, libraries=LIBRARIES)


@flow(name="tiny sd3", validate_parameters=False)
def make_tiny_sd3(recipe: TinySd3Recipe, folder: Path) -> None:
    """Build, train, save, measure. The previous model is replaced once the new one is complete."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    pipeline = build_pipeline(recipe)
    final_loss = train_diffusion_transformer(pipeline, recipe)
    measured: dict[str, object] = {"train_seconds": round(time.perf_counter() - started), "final_loss": final_loss}
    replace_folder(folder, lambda fresh: measure_and_save(pipeline, recipe, measured, fresh))


if __name__ == "__main__":
    with training_progress():
        make_tiny_sd3(TinySd3Recipe(), MODEL)
