"""A tiny GLM-Image with fresh weights, in memory and as a folder."""

from pathlib import Path

import pytest
import torch
from diffusers import GlmImagePipeline

from data.recipes.glm_image_parts import TinyRecipe, build_pipeline
from grpo_core.policies.glm_image.loading import ComponentConfigs


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
def tiny_configs(tiny_pipeline: GlmImagePipeline) -> ComponentConfigs:
    return ComponentConfigs(
        autoregressive=tiny_pipeline.vision_language_encoder.config,
        decoder=dict(tiny_pipeline.transformer.config),
        vae=dict(tiny_pipeline.vae.config),
        text_encoder=tiny_pipeline.text_encoder.config,
    )
