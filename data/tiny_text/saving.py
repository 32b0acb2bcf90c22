"""Writes a trained tiny text model as an ordinary transformers folder, with the recipe that made it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data.tiny_text.recipe import TinyTextRecipe

RECIPE_FILE = "recipe.json"
_VERSIONED = ("torch", "transformers", "tokenizers", "numpy")


def save_tiny_text_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Saves model and tokenizer; `AutoModelForCausalLM.from_pretrained(folder)` loads it without this project."""
    # Its bars would tear the training's own.
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_recipe(folder: Path, recipe: TinyTextRecipe, measured: Mapping[str, object]) -> None:
    """Writes recipe.json into a saved model's folder: the recipe, library versions, and what was measured.

    Args:
        folder: from :func:`save_tiny_text_model`.
        recipe: the one that was followed.
        measured: plain JSON values by name, such as the fields of the training metrics and reports.
    """
    content = {
        "recipe": asdict(recipe),
        "versions": {name: version(name) for name in _VERSIONED},
        "measured": dict(measured),
    }
    (folder / RECIPE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
