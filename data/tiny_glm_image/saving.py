"""Writes a trained tiny GLM-Image as an ordinary diffusers folder, with the recipe that made it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from diffusers import GlmImagePipeline

from data.tiny_glm_image.recipe import TinyRecipe

RECIPE_FILE = "recipe.json"
_VERSIONED = ("torch", "transformers", "diffusers", "tokenizers", "numpy")


def save_tiny_model(pipeline: GlmImagePipeline, folder: Path) -> None:
    """Saves the seven components; `GlmImagePipeline.from_pretrained(folder)` loads them without this project."""
    pipeline.save_pretrained(folder)


def write_recipe(folder: Path, recipe: TinyRecipe, measured: Mapping[str, object]) -> None:
    """Writes recipe.json into a saved model's folder: the recipe, library versions, and what was measured.

    Args:
        folder: from :func:`save_tiny_model`.
        recipe: the one that was followed.
        measured: plain JSON values by name, such as the fields of the training metrics and reports.
    """
    content = {
        "recipe": asdict(recipe),
        "versions": {name: version(name) for name in _VERSIONED},
        "measured": dict(measured),
    }
    (folder / RECIPE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
