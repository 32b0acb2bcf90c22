"""Every model type of transformers runs with the log-probs of a plain forward pass, or is refused by its name."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel, Qwen3NextConfig

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm import compatibility
from grpo_core.policies.causal_lm.compatibility import (
    refuse_incompatible,
    refuse_incompatible_model,
    small_copy,
    why_incompatible,
)
from grpo_core.policies.causal_lm.loading import matrices_without_adapter, train_language_model
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from tests.grpo_core.policies.causal_lm.model_types import (
    PAGE,
    TABLE,
    TYPES,
    change_inputs,
    configurations,
    make_model,
    outcome,
    page,
)

EXPECTED = json.loads(TABLE.read_text())
# Caches, heads, positions and routers of every kind that the sampler or the scorer could trip over.
QUICK = {
    "bert",
    "deepseek_v4",
    "electra",
    "llama4_text",
    "openai-gpt",
    "phimoe",
    "qwen3_next",
    "recurrent_gemma",
    "xlm",
}


@pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in TYPES]
)
def test_a_model_type_runs_or_is_refused(model_type: str) -> None:
    """`python -m tests.grpo_core.policies.causal_lm.model_types` writes what is expected."""
    assert outcome(model_type) == EXPECTED[model_type]


def test_every_model_type_is_expected_and_documented() -> None:
    assert EXPECTED.keys() == set(TYPES)
    assert PAGE.read_text() == page(EXPECTED)


def test_a_refusal_names_the_model_and_the_reason() -> None:
    config = configurations("qwen3_next")[0]
    with pytest.raises(InputError, match=r"qwen3_next.*LinearAttentionLayer") as caught:
        refuse_incompatible("some/model", config)
    assert (caught.value.place, caught.value.value) == ("policy.model", "some/model")


def test_a_model_without_a_small_copy_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    monkeypatch.setattr(compatibility, "small_copy", lambda config, seed: None)
    assert not refuse_incompatible("llama", model.config)
    refuse_incompatible_model("llama", model)
    with pytest.raises(InputError, match="keys and values"):
        refuse_incompatible_model("some/model", small_copy(configurations("recurrent_gemma")[0], 0))


# All types that run and whose forward pass computes them where the configuration asks for it.
ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "gpt_oss")
SLOWLY_ROUTED = (
    *("ernie4_5_moe", "flex_olmo", "flint", "granitemoe_swa", "granitemoeshared", "jetmoe", "laguna", "mellum"),
    *("minimax", "minimax_m2", "minimax_m3_vl_text"),
)


@pytest.mark.parametrize(
    "model_type", [*ROUTED, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOWLY_ROUTED)]
)
def test_losses_of_routers_are_left_out(model_type: str) -> None:
    config = configurations(model_type)[0]
    config.output_router_logits = config.get_text_config().output_router_logits = True
    assert why_incompatible(small_copy(config, 0)) is None


MISTAKES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "positions of padded prompts": ("gpt2", lambda given: given.pop("position_ids", None)),
    "padding that is read": ("llama", lambda given: given.pop("attention_mask", None)),
    "a window that the cache forgets": ("gemma2", lambda given: given.update(past_key_values=None)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_log_probs_are_seen(mistake: str) -> None:
    kind, change = MISTAKES[mistake]
    model: PreTrainedModel = make_model(kind)
    assert why_incompatible(model) is None
    change_inputs(model, change)
    assert "differ" in str(why_incompatible(model))


def test_a_small_copy_has_the_layers_of_its_model() -> None:
    config = Qwen3NextConfig(num_hidden_layers=12, num_experts=512)
    small: Any = small_copy(config, 0)
    assert small.config.layer_types == config.layer_types
    assert sum(parameter.numel() for parameter in small.parameters()) < 20e6
    assert small.config.vocab_size < config.vocab_size == Qwen3NextConfig().vocab_size


# --- adapters


def test_a_router_that_is_a_linear_layer_by_class_gets_no_adapter() -> None:
    model = small_copy(configurations("phimoe")[0], 0)
    with pytest.raises(InputError, match="router") as caught:
        train_language_model(model, TrainingChoice(LoraSettings(targets=".*router")), base_name="")
    assert caught.value.place == "policy.lora.targets"
    train_language_model(model, TrainingChoice(LoraSettings(rank=2)), base_name="")
    assert "model.layers.*.mlp.router.weight" in matrices_without_adapter(model)
    assert not any("router.lora" in name for name, _ in model.named_parameters())


def test_matrices_without_an_adapter_are_counted() -> None:
    """DeepSeek-V3: peft takes its dense MLPs and shared experts for experts."""
    model = small_copy(configurations("deepseek_v3")[0], 0)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    train_language_model(model, TrainingChoice(LoraSettings(rank=2)), base_name="")
    shared = "model.layers.{}.mlp.shared_experts.gate_proj.weight"
    expected = sum(sizes.get(shared.format(layer), 0) for layer in range(len(model.model.layers)))
    assert matrices_without_adapter(model)[shared.format("*")] == expected > 0
    assert matrices_without_adapter(_adapted("llama")) == {}


def _adapted(kind: str) -> Any:
    model = make_model(kind)
    train_language_model(model, TrainingChoice(LoraSettings(rank=2)), base_name="")
    return model
