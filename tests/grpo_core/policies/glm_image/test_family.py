"""What is refused of a saved GLM-Image before anything is loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_core.errors import InputError
from grpo_core.policies.glm_image.family import FAMILY
from grpo_core.policies.glm_image.settings import GlmImageSettings

MODELS = Path(__file__).parents[4] / "data" / "models"
SETTINGS = GlmImageSettings(height=64, width=64, num_inference_steps=4, guidance_scale=1.0)


def changed(target: Path, **values: Any) -> str:
    """Copy the tiny model's configuration files and change its scheduler's."""
    shutil.copytree(MODELS / "tiny-glm-image", target, ignore=shutil.ignore_patterns("*.safetensors"))
    file = target / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return str(target)


def test_the_tiny_model_passes() -> None:
    FAMILY.refuse_missing(str(MODELS / "tiny-glm-image"))
    FAMILY.refuse_unusable(str(MODELS / "tiny-glm-image"), SETTINGS)


def test_another_pipeline_is_of_another_kind() -> None:
    with pytest.raises(InputError, match=r"StableDiffusion3Pipeline; set policy\.kind to diffusers"):
        FAMILY.refuse_missing(str(MODELS / "tiny-sd3"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stochastic_sampling": True}, "set stochastic_sampling to false"),
        ({"_class_name": "DDIMScheduler"}, "It denoises with DDIMScheduler"),
    ],
)
def test_a_scheduler_that_cannot_be_scored_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        FAMILY.refuse_unusable(changed(tmp_path / "changed", **values), SETTINGS)
    assert refused.value.place == "policy.model"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("vision_language_encoder/model.safetensors", r"folder vision_language_encoder has no model\.safetensors"),
        ("transformer/diffusion_pytorch_model.safetensors", "folder transformer has no diffusion_pytorch_model"),
        ("text_encoder/*", "names text_encoder, and it has no such folder"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, missing: str, message: str) -> None:
    folder = Path(shutil.copytree(MODELS / "tiny-glm-image", tmp_path / "model"))
    for file in list(folder.glob(missing)):
        file.unlink()
    if missing.endswith("*"):
        (folder / missing).parent.rmdir()
    with pytest.raises(InputError, match=message):
        FAMILY.refuse_unusable(str(folder), SETTINGS)
