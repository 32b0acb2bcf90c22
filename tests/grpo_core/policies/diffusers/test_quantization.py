"""Pipelines with parts in 4 bits: steps are scored as they were drawn; diffusers' own parts need a GPU."""

import pytest
import torch
from diffusers.quantizers.bitsandbytes import bnb_quantizer

from grpo_core.errors import InputError
from grpo_core.policies.diffusers.component import DiffusersDenoising
from grpo_core.policies.diffusers.loading import load_pipeline, require_saved_pipeline, train_transformer
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.trained.quantization import QuantizationSettings, quantized_layers
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from tests.grpo_core.policies.denoising.tiny_pipelines import disturb
from tests.grpo_core.policies.diffusers.tiny_classes import settings
from tests.grpo_core.policies.diffusers.tiny_pipelines import SavedFolder, request

LORA = LoraSettings(rank=4, alpha=8.0)
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
CPU = torch.device("cpu")


def difference(policy: DiffusersPolicy) -> float:
    """The largest of recomputed log-probs from those that were sampled with, all rows and one alone."""
    (group,) = policy.sample([request(samples=3)])
    sampled = group.streams["denoising"]
    policy.denoising.prepare_for_update()
    found = 0.0
    for rows in ([0, 1, 2], [1]):
        again = policy.denoising.logprobs(sampled.actions.select(rows)).logprobs.detach()
        found = max(found, float((again - sampled.rollout_logprobs[rows]).abs().max()))
    return found


def test_text_encoders_are_quantized_on_any_machine(saved_folder: SavedFolder) -> None:
    quantization = QuantizationSettings("nf4", components=ENCODERS)
    choice = TrainingChoice(LORA, quantization=quantization)
    policy = DiffusersPolicy.load(str(saved_folder("sd3")), settings(), {"denoising": choice})
    pipeline = policy.denoising.pipeline
    assert all(any(True for _ in quantized_layers(getattr(pipeline, name))) for name in ENCODERS)
    assert not any(True for _ in quantized_layers(pipeline.transformer))
    disturb(policy.denoising.trained)
    assert difference(policy) < 1e-5


def test_steps_of_a_quantized_transformer_are_scored_as_they_were_drawn(
    saved_folder: SavedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers asks for a GPU before it does the same on a CPU; without one, its question is left out here."""
    quantizer = bnb_quantizer.BnB4BitDiffusersQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda *given, **named: None)
    folder, chosen = str(saved_folder("sd3")), settings()
    quantization = QuantizationSettings("nf4", components=("transformer",))
    pipeline = load_pipeline(folder, dtype=torch.float32, device=CPU, quantization=quantization)
    trained = train_transformer(pipeline.transformer, TrainingChoice(LORA, quantization=quantization), folder)
    disturb(trained)
    policy = DiffusersPolicy(DiffusersDenoising(pipeline, require_saved_pipeline(folder), chosen, trained))
    assert any(True for _ in quantized_layers(pipeline.transformer))
    assert difference(policy) < 1e-5
    (group,) = policy.sample([request(samples=1)])
    policy.denoising.logprobs(group.streams["denoising"].actions).logprobs.sum().backward()
    assert all(each.grad is not None for each in trained.trainable_parameters().values())


def test_a_transformer_in_4_bits_is_refused_without_a_gpu(saved_folder: SavedFolder) -> None:
    choice = TrainingChoice(LORA, quantization=QuantizationSettings("nf4"))
    with pytest.raises(InputError, match="diffusers runs its models in 4 bits on a GPU only"):
        DiffusersPolicy.load(str(saved_folder("sd3")), settings(), {"denoising": choice})
