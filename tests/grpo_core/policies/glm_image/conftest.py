"""A tiny GLM-Image with fresh weights, in memory and as a folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import GlmImagePipeline

from data.recipes.glm_image_parts import TinyRecipe, build_pipeline


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="package")
def tiny_pipeline() -> GlmImagePipeline:
    return build_pipeline(TinyRecipe())


@pytest.fixture(scope="package")
def tiny_folder(tiny_pipeline: GlmImagePipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-glm-image")
    tiny_pipeline.save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def tiny_config(tiny_pipeline: GlmImagePipeline) -> Any:
    """Of the token model."""
    return tiny_pipeline.vision_language_encoder.config
