"""What is trained and what is left alone; saved weights of tied models; recomputation; refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from grpo_core.errors import InputError
from grpo_core.policies.trained.component import refuse_unscaled_float16
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.settings import OptimizerSettings
from tasks.models.initial import weights_digest
from tests.grpo_core.policies.denoising.tiny_pipelines import DECODER_LINEARS, MAKE
from tests.grpo_core.policies.trained.tiny_models import disturb, logprobs, same, tiny_llama, tiny_opt, values_of

LORA = LoraSettings(2, 4.0, r".*\.(q_proj|v_proj)")
FULL = TrainingChoice(None, reference="device")


def one_step(model: TrainedModel) -> None:
    model.prepare_for_update()
    optimizer = PolicyOptimizer(model.trainable_parameters(), OptimizerSettings(0.1))
    logprobs(model.model)[..., 3].mean().backward()
    optimizer.step()


def all_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# --- frozen parts


def test_a_step_leaves_frozen_bits_alone_and_moves_the_others() -> None:
    choice = TrainingChoice(None, frozen=r"model\.embed_tokens\.weight|.*\.mlp\..*")
    model = train_model(tiny_llama(), choice, base_name="tiny", own_frozen=("lm_head.",))
    before = all_weights(model.model)
    one_step(model)
    moved = {name for name, value in all_weights(model.model).items() if not torch.equal(value, before[name])}
    still = {name for name in before if "embed_tokens" in name or ".mlp." in name or name.startswith("lm_head")}
    assert moved == before.keys() - still
    assert len(still) == 2 + 2 * 3


@pytest.mark.parametrize("pattern", ["embed_tokens", r"model\.visual\..*", ".*"], ids=["part", "none", "everything"])
def test_a_pattern_of_no_parameter_or_of_all_is_refused(pattern: str) -> None:
    with pytest.raises(InputError) as refused:
        train_model(tiny_llama(), TrainingChoice(None, frozen=pattern), base_name="tiny")
    assert (refused.value.place, refused.value.value) == ("policy.frozen", pattern)
    assert pattern == ".*" or "model.embed_tokens.weight" in refused.value.hint


@pytest.mark.parametrize(("lora", "pattern"), [(None, "*.mlp"), (LORA, ".*mlp.*")], ids=["no pattern", "adapters"])
def test_what_is_no_pattern_is_refused_before_a_model_is_loaded(lora: LoraSettings | None, pattern: str) -> None:
    with pytest.raises(InputError) as refused:
        TrainingChoice(lora, frozen=pattern)
    assert (refused.value.place, refused.value.value) == ("policy.frozen", pattern)


# --- adapters


def test_adapters_come_from_their_seed() -> None:
    first, again, other = (
        train_model(tiny_llama(), TrainingChoice(LORA, seed=seed), base_name="tiny").trainable_parameters()
        for seed in (1, 1, 2)
    )
    assert same(values_of(first), values_of(again))
    assert not same(values_of(first), values_of(other))


# --- full weights, tied and not


FULL_MODELS: dict[str, tuple[Callable[[int], Any], Any, str]] = {
    "tied": (lambda seed: tiny_llama(tied=True, seed=seed), LlamaForCausalLM, "model.safetensors"),
    "separate": (lambda seed: tiny_llama(seed=seed), LlamaForCausalLM, "model.safetensors"),
    "SD3": (lambda seed: MAKE["sd3"]()[0].transformer, SD3Transformer2DModel, "diffusion_pytorch_model.safetensors"),
}


@pytest.mark.parametrize("kind", FULL_MODELS)
def test_full_weights_come_back_to_the_bit_here_and_in_their_library(kind: str, tmp_path: Path) -> None:
    build, library, file = FULL_MODELS[kind]
    first, second = (train_model(build(seed), FULL, base_name="tiny") for seed in (0, 1))
    disturb(first.trainable_parameters())
    first.save(tmp_path)
    start, stored = all_weights(second.model), load_file(tmp_path / file)
    assert stored.keys() == start.keys() - ({"lm_head.weight"} if kind == "tied" else set())
    second.load(tmp_path)
    assert same(all_weights(second.model), all_weights(first.model))
    assert same(all_weights(library.from_pretrained(tmp_path)), all_weights(first.model))
    if kind == "tied":
        assert second.model.lm_head.weight is second.model.model.embed_tokens.weight  # type: ignore[union-attr]
    second.load(None)
    assert same(all_weights(second.model), start)


def test_a_tied_reference_is_the_model_before_training() -> None:
    model = train_model(tiny_llama(tied=True), TrainingChoice(None, reference="device"), base_name="tiny")
    disturb(model.trainable_parameters())
    with torch.no_grad(), model.reference() as reference:
        assert torch.equal(logprobs(reference), logprobs(tiny_llama(tied=True)))


def test_a_tied_head_is_frozen_by_its_embedding_s_name() -> None:
    with pytest.raises(InputError, match="embed_tokens"):
        train_model(tiny_llama(tied=True), TrainingChoice(None, frozen=r"lm_head\.weight"), base_name="tiny")
    choice = TrainingChoice(None, frozen=r"model\.embed_tokens\.weight")
    model = train_model(tiny_llama(tied=True), choice, base_name="tiny")
    before = all_weights(model.model)["lm_head.weight"]
    one_step(model)
    assert torch.equal(model.model.lm_head.weight, before)  # type: ignore[union-attr]


# --- recomputation


def gradients(model: TrainedModel) -> dict[str, torch.Tensor]:
    model.prepare_for_update()
    logprobs(model.model)[..., 3].mean().backward()
    return {name: p.grad.clone() for name, p in model.trainable_parameters().items() if p.grad is not None}


def saved_bytes(model: TrainedModel) -> int:
    """Bytes of all tensors that a graph keeps."""
    kept: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    model.prepare_for_update()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        logprobs(model.model).sum()
    return sum(kept.values())


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapters", "full weights"])
@pytest.mark.parametrize("build", [tiny_llama, lambda: tiny_opt(0.5)], ids=["llama", "layers with dropout"])
def test_recomputation_changes_memory_and_no_gradient(lora: LoraSettings | None, build: Any) -> None:
    plain = train_model(build(), TrainingChoice(lora), base_name="tiny")
    checkpointed = train_model(build(), TrainingChoice(lora, gradient_checkpointing=True), base_name="tiny")
    for model in (plain, checkpointed):
        disturb(model.trainable_parameters())
    expected, found = gradients(plain), gradients(checkpointed)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], value, rtol=1e-5, atol=1e-8) for name, value in expected.items())
    assert saved_bytes(checkpointed) < 0.75 * saved_bytes(plain)
    checkpointed.prepare_for_sampling()
    assert not any(module.training for module in checkpointed.model.modules())


# --- 16 bits


@pytest.mark.parametrize(
    ("dtype", "inner", "place"),
    [(torch.float16, None, "policy.dtype"), (torch.float32, torch.float16, "policy.autocast")],
)
def test_float16_is_refused(dtype: torch.dtype, inner: torch.dtype | None, place: str) -> None:
    with pytest.raises(InputError) as refused:
        refuse_unscaled_float16(dtype, inner)
    assert (refused.value.place, refused.value.value) == (place, "float16")
    refuse_unscaled_float16(torch.float32, torch.bfloat16)


def trained(name: str = "sd3") -> TrainedModel:
    pipeline, _ = MAKE[name]()
    return train_model(pipeline.transformer, FULL, base_name=name, default_targets=DECODER_LINEARS)


def test_weights_in_shards_are_read_and_counted(tmp_path: Path) -> None:
    first, second = trained(), trained()
    disturb(first.trainable_parameters())
    first.model.save_pretrained(tmp_path, max_shard_size="50KB")  # type: ignore[operator]
    shards = sorted(tmp_path.glob("diffusion_pytorch_model-*.safetensors"))
    assert len(shards) > 2
    second.load(tmp_path)
    assert same(values_of(first.trainable_parameters()), values_of(second.trainable_parameters()))
    before = weights_digest(tmp_path)
    content = bytearray(shards[1].read_bytes())
    content[-1] ^= 1
    shards[1].write_bytes(bytes(content))
    assert weights_digest(tmp_path) != before
