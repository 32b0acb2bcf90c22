"""Writes a trained tiny GLM-Image as an ordinary diffusers folder."""

from pathlib import Path

from diffusers import GlmImagePipeline

LIBRARIES = ("torch", "transformers", "diffusers", "tokenizers", "numpy")
"""Whose versions decide what comes of the recipe."""


def save_tiny_model(pipeline: GlmImagePipeline, folder: Path) -> None:
    """Saves the seven components; `GlmImagePipeline.from_pretrained(folder)` loads them without this project."""
    pipeline.save_pretrained(folder)
