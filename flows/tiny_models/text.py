"""Make the shipped tiny text model again from its recipe: weights, files, measurements, prompt files.

`python -m flows.tiny_models.text`; the same recipe gives the same weights on the same machine.
"""

import time
from dataclasses import asdict
from pathlib import Path

import torch
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data.tiny_text import (
    LIBRARIES,
    TinyTextRecipe,
    build_model,
    build_tokenizer,
    evaluate_tiny_text_model,
    save_tiny_text_model,
    split_words,
    train_model,
    write_prompt_files,
)
from data.training import write_recipe
from flows.terminal.progress import training_progress
from flows.tiny_models import DATA, replace_folder
from tasks.progress import progress_of

MODEL = DATA / "models" / "tiny-text"
TEMPERATURES = (1.0, 0.1)


@task(name="train text model", cache_policy=NO_CACHE)
def train_text_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: TinyTextRecipe) -> float:
    """Train with cross-entropy on imperfect answers; changes the model in place."""
    report_progress = progress_of("train text model", recipe.steps)
    return train_model(model, tokenizer, recipe, lambda step, steps, loss: report_progress(step))


@task(name="measure and save", cache_policy=NO_CACHE)
def measure_and_save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: TinyTextRecipe,
    measured: dict[str, object],
    folder: Path,
) -> None:
    """Save, load again as a user would, measure on held-out words, and write the recipe next to it."""
    _, unseen = split_words(recipe.seed, train=0, heldout=recipe.heldout_words)
    save_tiny_text_model(model, tokenizer, folder)
    reports = [asdict(evaluate_tiny_text_model(folder, unseen, temperature=warm)) for warm in TEMPERATURES]
    write_recipe(folder, recipe, {**measured, "heldout": reports}, libraries=LIBRARIES)


@task(name="write text prompt files", cache_policy=NO_CACHE)
def write_files(recipe: TinyTextRecipe) -> None:
    """Write prompts with their answers for training with rewards; the model has never seen the held-out ones."""
    write_prompt_files(recipe, DATA / "prompts")


@flow(name="tiny text model", validate_parameters=False)
def make_tiny_text_model(recipe: TinyTextRecipe, folder: Path) -> None:
    """Build, train, save, measure. The previous model is replaced once the new one is complete."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    tokenizer = build_tokenizer()
    model = build_model(recipe, tokenizer)
    final_loss = train_text_model(model, tokenizer, recipe)
    measured: dict[str, object] = {"train_seconds": round(time.perf_counter() - started), "final_loss": final_loss}
    replace_folder(folder, lambda fresh: measure_and_save(model, tokenizer, recipe, measured, fresh))
    write_files(recipe)


if __name__ == "__main__":
    with training_progress():
        make_tiny_text_model(TinyTextRecipe(), MODEL)
