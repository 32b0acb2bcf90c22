"""Adapters of denoising models as diffusers alone loads them: to the bit, and at full strength."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.sections import PolicySection
from flows.export.export import write_adapter
from flows.export.usage import DIFFUSERS_FILE
from grpo_core.policies.denoising.component import DenoisingComponent
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from tests.flows.conftest import refused
from tests.grpo_core.policies.denoising.tiny_pipelines import (
    DECODER_LINEARS,
    MAKE,
    PIPELINES,
    RandomComponent,
    component,
    disturb,
    drafts,
    size_of,
)

PROMPTS = ("a red circle",) * 2
SECTION = PolicySection(kind="diffusers", model="org/base", train=("denoising",))


def latents(made: DenoisingComponent, name: str, pipeline: Any) -> Tensor:
    """What a pipeline draws in two steps, without a scheduler of ours."""
    pipeline.set_progress_bar_config(disable=True)
    size = size_of(name)
    call = made.call_arguments(PROMPTS, drafts(name, size, len(PROMPTS)), size)
    noise = [torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))]
    drawn: Tensor = pipeline(**call, num_inference_steps=2, generator=noise, output_type="latent").images
    return drawn


def exported(made: DenoisingComponent, folder: Path) -> Path:
    weights, out = folder / "weights", folder / "exported"
    weights.mkdir()
    made.save_weights(weights)
    write_adapter("denoising", weights, out, SECTION)
    return out


@pytest.mark.parametrize("name", PIPELINES)
def test_diffusers_draws_with_the_adapter_what_the_policy_draws(name: str, tmp_path: Path) -> None:
    made = component(name)
    expected, folder = latents(made, name, made.pipeline), exported(made, tmp_path)
    plain, _ = MAKE[name]()
    assert not torch.allclose(latents(made, name, plain), expected, atol=1e-3)
    plain.transformer.load_lora_adapter(str(folder), weight_name=DIFFUSERS_FILE)
    assert torch.equal(latents(made, name, plain), expected)
    # GlmImagePipeline has no loader of its own.
    if name != "glm_image":
        other, _ = MAKE[name]()
        other.load_lora_weights(str(folder))
        assert torch.equal(latents(made, name, other), expected)


def adapted(settings: LoraSettings) -> RandomComponent:
    pipeline, arguments = MAKE["sd3"]()
    trained = train_model(
        pipeline.transformer, TrainingChoice(settings), base_name="sd3", default_targets=DECODER_LINEARS
    )
    disturb(trained)  # type: ignore[arg-type]
    made = component("sd3")
    return RandomComponent(pipeline, made.settings, trained, arguments=arguments)


@pytest.mark.parametrize("kind", ["rslora", "dora"])
def test_other_kinds_of_adapters_are_loaded_as_they_are(kind: str, tmp_path: Path) -> None:
    made = adapted(LoraSettings(4, 8.0, use_rslora=kind == "rslora", use_dora=kind == "dora"))
    plain, _ = MAKE["sd3"]()
    plain.load_lora_weights(str(exported(made, tmp_path)))
    torch.testing.assert_close(
        latents(made, "sd3", plain), latents(made, "sd3", made.pipeline), atol=0 if kind == "rslora" else 1e-5, rtol=0
    )


def test_an_adapter_with_whole_modules_is_refused(tmp_path: Path) -> None:
    made = adapted(LoraSettings(4, 8.0, modules_to_save=("proj_out",)))
    (error,) = refused(lambda: exported(made, tmp_path))
    assert error.place == "policy.lora.modules_to_save"
