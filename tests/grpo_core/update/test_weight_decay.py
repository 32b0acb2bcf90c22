"""Weight decay touches the parameters that transformers' Trainer lets it touch, in every kind of model."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import nn
from transformers import Trainer

from grpo_core.policies.causal_lm.loading import train_language_model
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.settings import OptimizerSettings
from tests.grpo_core.policies.causal_lm.model_types import CONFIGS, make_model
from tests.grpo_core.policies.trained.tiny_models import tiny_opt, values_of
from tests.grpo_core.policies.vision_lm import tiny_families
from tests.tiny_policies import MODEL

MODELS: Mapping[str, Callable[[], Any]] = {
    **{kind: lambda kind=kind: make_model(kind) for kind in CONFIGS},
    "opt": lambda: tiny_opt(0.0),
    **{kind: lambda kind=kind: tiny_families.make_model(kind)[0] for kind in ("qwen2_vl", "qwen3_vl", "gemma3")},
    "sd3": lambda: SD3Transformer2DModel.from_pretrained(MODEL.with_name("tiny-sd3") / "transformer"),
}


def trainer_names(model: nn.Module) -> set[str]:
    trainer: Any = None
    return {*Trainer.get_decay_parameter_names(trainer, model)}


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_weights_decay_as_in_transformers_trainer(kind: str) -> None:
    trained = train_model(MODELS[kind](), TrainingChoice(None), base_name="")
    names = {*trained.trainable_parameters()}
    undecayed = trained.undecayed_parameters()
    assert names - undecayed == names & trainer_names(trained.model)
    assert 0 < len(undecayed) < len(names)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_adapters_decay_and_norms_that_are_trained_whole_do_not(kind: str) -> None:
    norm = {"llama": "norm", "gpt2": "ln_f", "opt": "final_layer_norm"}[kind]
    choice = TrainingChoice(LoraSettings(rank=2, modules_to_save=(norm,)))
    trained: TrainedModel = train_language_model(MODELS[kind](), choice, base_name="")
    names, undecayed = {*trained.trainable_parameters()}, trained.undecayed_parameters()
    assert names - undecayed == names & trainer_names(trained.model)
    assert not any("lora" in name for name in undecayed)
    assert undecayed


@pytest.mark.parametrize("offload", [False, True])
def test_steps_are_those_of_adamw_with_the_trainers_groups(offload: bool) -> None:
    trained = train_model(make_model("qwen2"), TrainingChoice(None), base_name="")
    parameters = trained.trainable_parameters()
    start = values_of(parameters)
    decayed = trainer_names(trained.model)
    plain = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    groups = [
        {"params": [each for name, each in plain.items() if (name in decayed) == decays], "weight_decay": 0.3 * decays}
        for decays in (True, False)
    ]
    oracle = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    settings = OptimizerSettings(1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.3, offload_optimizer=offload)
    optimizer = PolicyOptimizer(parameters, settings, undecayed=trained.undecayed_parameters())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in parameters.items():
            plain[name].grad = parameter.grad = torch.randn(parameter.shape, generator=generator)
        oracle.step()
        optimizer.step()
        if step == 0:
            # A state has no groups: what was stored before goes on.
            again = PolicyOptimizer(parameters, settings, steps=1, undecayed=trained.undecayed_parameters())
            again.load_state(optimizer.state())
            optimizer = again
    assert all(torch.equal(parameter, plain[name]) for name, parameter in parameters.items())
