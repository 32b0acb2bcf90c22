"""Quantized bases: sampling and scoring agree, gradients are those of the dequantized weights, and what is refused."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.family import FAMILY as TEXTS
from grpo_core.policies.causal_lm.loading import copy_tokenizer, load_model
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.glm_image.family import FAMILY as GLM_IMAGE
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.trained.quantization import (
    BYTES_IN_4_BITS,
    QuantizationSettings,
    prepare_layers,
    quantized_layers,
)
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.policies.vision_lm.loading import vision_parameters
from grpo_core.policies.vision_lm.policy import VisionLMPolicy
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.rollouts.actions import TokenBatch
from tests.grpo_core.policies.trained.tiny_models import disturb
from tests.grpo_core.policies.vision_lm.tiny_families import PROMPTS as QUESTIONS
from tests.grpo_core.policies.vision_lm.tiny_families import SOURCES
from tests.tiny_policies import MODEL, PROMPTS, TEXT_MODEL, TEXT_PROMPTS, VISION_MODEL

# peft reads an attribute of transformers by its previous name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

CPU = torch.device("cpu")
KINDS = {
    "nf4": QuantizationSettings("nf4"),
    "nf4-double": QuantizationSettings("nf4", double_quant=True),
    "fp4": QuantizationSettings("fp4"),
}
# The others are stored as nf4 is, and have tests of their gradients and of their bytes.
BY_BITS = [pytest.param(kind, marks=() if kind == "nf4" else pytest.mark.slow) for kind in KINDS]
LORA = LoraSettings(rank=4, alpha=8.0)


def choice(quantization: QuantizationSettings | None, **lora: Any) -> TrainingChoice:
    return TrainingChoice(replace(LORA, **lora), quantization=quantization)


def text_policy(chosen: TrainingChoice) -> CausalLMPolicy:
    return CausalLMPolicy.load(str(TEXT_MODEL), CausalLMSettings(max_completion_length=12), {"tokens": chosen})


def sampled_texts(chosen: TrainingChoice) -> tuple[CausalLMPolicy, Any]:
    policy = text_policy(chosen)
    disturb(policy.trainable_parameters(), 0.05)
    return policy, policy.sample_tokens(TEXT_PROMPTS, 4, range(4 * len(TEXT_PROMPTS)))


def differences(component: Any, sampled: Any) -> Tensor:
    """Of the recomputed log-probs of some batches, one of them a single row, from those that were sampled with."""
    component.prepare_for_update()
    found = []
    for rows in (range(len(sampled.actions)), [1]):
        actions: TokenBatch = sampled.actions.select(list(rows))
        again = component.logprobs(actions).logprobs
        apart = (again - sampled.rollout_logprobs[list(rows)]).abs()
        found.append(apart[actions.loss_mask])
    return torch.cat(found).detach()


def assert_parity(apart: Tensor) -> None:
    assert float(apart.max()) < 1e-4
    assert float(apart.mean()) < 1e-5


@pytest.mark.parametrize("kind", BY_BITS)
def test_texts_are_scored_as_they_were_sampled(kind: str) -> None:
    policy, sampled = sampled_texts(choice(KINDS[kind]))
    layers = list(quantized_layers(policy.trained.model))
    assert len(layers) == 14, "all linear layers but the head"
    assert_parity(differences(policy, sampled))
    with policy.trained.reference() as reference, torch.no_grad():
        own = policy._score(reference, sampled.actions, entropy="none").logprobs
    base = text_policy(choice(KINDS[kind])).logprobs(sampled.actions).logprobs
    torch.testing.assert_close(own, base, atol=1e-5, rtol=0)


def test_dora_over_4_bits_is_scored_as_it_was_sampled() -> None:
    assert_parity(differences(*sampled_texts(choice(KINDS["nf4"], use_dora=True))))


def test_answers_about_images_are_scored_as_they_were_sampled() -> None:
    settings = VisionLMSettings(max_completion_length=6)
    policy = VisionLMPolicy.load(str(VISION_MODEL), settings, {"tokens": choice(KINDS["nf4"])})
    vision = {id(each) for each in vision_parameters(policy._model)}
    assert all(each.is_floating_point() for each in policy._model.parameters() if id(each) in vision)
    disturb(policy.trainable_parameters(), 0.05)
    sampled = policy.sample_tokens(QUESTIONS, 3, range(3 * len(QUESTIONS)), sources=SOURCES)
    assert_parity(differences(policy, sampled))


def test_image_tokens_are_scored_as_they_were_sampled() -> None:
    quantization = replace(KINDS["nf4"], components=("vision_language_encoder", "text_encoder"))
    settings = GlmImageSettings(height=64, width=64, num_inference_steps=2, guidance_scale=1.0)
    policy = GlmImagePolicy.load(str(MODEL), settings, {"tokens": choice(quantization)})
    model = policy.tokens._base.model
    assert all(each.is_floating_point() for part in (model.visual, model.vqmodel) for each in part.parameters())
    assert next(quantized_layers(policy.tokens.pipeline.text_encoder), None) is not None
    disturb(policy.tokens.trainable_parameters(), 0.05)
    sampled = policy.tokens.sample(PROMPTS[:2], 2, range(4))
    assert_parity(differences(policy.tokens, sampled))


# Plain scripts, over a model whose matrices 4 bits can be packed for AVX512-BF16.
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
IDS = torch.arange(24).reshape(3, 8) * 5 % 61


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def adapted(base: nn.Module) -> Any:
    """With adapters whose values depend on their names alone."""
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets)).eval()  # type: ignore[arg-type]
    disturb({name: each for name, each in model.named_parameters() if each.requires_grad}, 0.05)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of the adapters after a pass without gradients, as sampling makes one."""
    with torch.no_grad():
        model(input_ids=IDS)
    model(input_ids=IDS).logits.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).square().mean().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def dequantized(saved: Path, quantized: nn.Module) -> Any:
    """The model in fp32 with the quantized weights, which bitsandbytes itself turns into numbers again."""
    plain = LlamaForCausalLM.from_pretrained(saved, dtype=torch.float32)
    for name, layer in quantized.named_modules():
        if type(layer).__module__.startswith("bitsandbytes"):
            weight: Any = layer.weight
            values = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
            plain.get_submodule(name).weight.data = values.float()  # type: ignore[union-attr]
    return plain


def errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[float]:
    """The largest error of each gradient, relative to its largest value."""
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        yield float((found[name] - each).abs().max() / each.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_adapters_are_those_over_the_dequantized_weights(saved: Path, kind: str) -> None:
    model = load_model(str(saved), dtype=torch.float32, device=CPU, quantization=KINDS[kind])
    expected = gradients(adapted(dequantized(saved, model)))
    assert max(errors(gradients(adapted(model)), expected)) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_counts_what_is_loaded(kind: str) -> None:
    settings = CausalLMSettings(max_completion_length=12)
    model = load_model(str(TEXT_MODEL), dtype=torch.float32, device=CPU, quantization=KINDS[kind])
    with torch.device("meta"):
        sizes = TEXTS.sizes(str(TEXT_MODEL), settings, {"tokens": choice(KINDS[kind])}, ())
    layers = list(quantized_layers(model))
    count = sum(layer.in_features * layer.out_features for layer in layers)
    held = sum(each.untyped_storage().nbytes() for layer in layers for each in tensors_of(layer.weight))
    assert sizes.quantized == {"weights": count}
    # Tables of a tiny matrix weigh more than those of a large one.
    assert 0.97 < held / (BYTES_IN_4_BITS * count) < 1.35


def tensors_of(weight: Any) -> Iterator[Tensor]:
    yield weight.data
    states = [weight.quant_state, *([weight.quant_state.state2] if weight.quant_state.nested else [])]
    yield from (each for state in states for each in (state.absmax, state.code))
    if weight.quant_state.nested:
        yield weight.quant_state.offset


def test_weights_stored_in_4_bits_are_trained_over_as_they_are(tmp_path: Path) -> None:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    folder = tmp_path / "stored"
    LlamaForCausalLM.from_pretrained(TEXT_MODEL, dtype=torch.float32, quantization_config=config).save_pretrained(
        folder
    )
    copy_tokenizer(TEXT_MODEL, folder)
    policy = CausalLMPolicy.load(
        str(folder), CausalLMSettings(max_completion_length=12), {"tokens": TrainingChoice(LORA)}
    )
    disturb(policy.trainable_parameters(), 0.05)
    sampled = policy.sample_tokens(TEXT_PROMPTS, 4, range(4 * len(TEXT_PROMPTS)))
    assert_parity(differences(policy, sampled))
    expected, _ = sampled_texts(choice(KINDS["nf4"]))
    torch.testing.assert_close(policy.logprobs(sampled.actions).logprobs, expected.logprobs(sampled.actions).logprobs)
    with pytest.raises(InputError, match="stored in nf4 already"):
        TEXTS.refuse_quantization(str(folder), KINDS["fp4"], ("tokens",), CPU, adapters=True)
    with pytest.raises(InputError, match="cannot be trained"):
        TEXTS.refuse_quantization(str(folder), None, ("tokens",), CPU, adapters=False)
    stored = json.loads((folder / "config.json").read_text())
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    for other, named in (({"quant_method": "gptq", "bits": 4}, "gptq"), (eight, "bitsandbytes in 8 bits")):
        (folder / "config.json").write_text(json.dumps({**stored, "quantization_config": other}))
        with pytest.raises(InputError, match=f"quantized by {named}"):
            TEXTS.refuse_quantization(str(folder), None, ("tokens",), CPU, adapters=True)


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        (KINDS["nf4"], "diffusers runs its models in 4 bits on a GPU only"),
        (replace(KINDS["nf4"], components=("vae",)), "vision_language_encoder, transformer, text_encoder can be"),
    ],
)
def test_parts_that_cannot_be_quantized_are_refused_before_anything_is_loaded(
    quantization: QuantizationSettings, match: str
) -> None:
    with pytest.raises(InputError, match=match):
        GLM_IMAGE.refuse_quantization(str(MODEL), quantization, ("tokens",), CPU, adapters=True)


def test_what_cannot_be_trained_over_a_quantized_base_is_refused() -> None:
    with pytest.raises(InputError, match="Quantized weights cannot be trained"):
        TrainingChoice(None, quantization=KINDS["nf4"])
    with pytest.raises(InputError, match="would be rounded again"):
        choice(KINDS["nf4"], init_lora_weights="pissa")
    with pytest.raises(InputError, match=r"skip_modules"):
        text_policy(choice(KINDS["nf4"], modules_to_save=("down_proj",)))
    text_policy(choice(replace(KINDS["nf4"], skip_modules=("down_proj",)), modules_to_save=("down_proj",)))


def test_adapters_are_not_merged_into_quantized_weights() -> None:
    policy = text_policy(choice(KINDS["nf4"]))
    before = [layer.weight.data_ptr() for layer in quantized_layers(policy.trained.model)]
    with policy.trained.merged():
        inside = [layer.weight.data_ptr() for layer in quantized_layers(policy.trained.model)]
        assert inside == before
        assert all(each.merged is False for each in policy.trained.model.modules() if hasattr(each, "merged_adapters"))


def test_a_model_of_which_no_layer_is_quantized_is_refused() -> None:
    prepare_layers(nn.Linear(2, 2), None)
    with pytest.raises(InputError, match="Linear has no linear layer outside") as refused:
        prepare_layers(nn.Linear(2, 2), QuantizationSettings("nf4"))
    assert (refused.value.place, refused.value.value) == ("policy.quantization.kind", "nf4")
