"""Adapters over a base in bfloat16 are multiplied in bfloat16, and what they hold in fp32 is not lost."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.policies.trained.adapter_products import add_adapter, factors, kept_factors, use_bfloat16_products
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from tests.grpo_core.policies.trained.tiny_models import disturb, logprobs, tiny_llama

LORA = LoraSettings(rank=4, alpha=6.0, targets=r".*_proj|embed_tokens")
RANK, SCALING = 3, 1.5


def matrices(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Random fp32 matrices, of which the last two are an adapter's."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_factors_hold_what_bfloat16_alone_would_round_off() -> None:
    down, up = (each.double() for each in matrices((RANK, 11), (7, RANK)))
    wide, tall = factors(down.float(), up.float())
    assert {wide.dtype, tall.dtype} == {torch.bfloat16}
    error = (tall.double() @ wide.double() - up @ down).norm() / (up @ down).norm()
    rounded = (up.bfloat16().double() @ down.bfloat16().double() - up @ down).norm() / (up @ down).norm()
    assert error < 2**-15 < 2**-9 < rounded


@pytest.mark.parametrize("scaling", [SCALING, 0.7])
def test_outputs_and_gradients_are_those_of_the_adapter(scaling: float) -> None:
    """The oracle is the formula in fp64; bfloat16 rounds the output by 2^-9, and what is between by as much."""
    base, x, weights, down, up = matrices((2, 5, 64), (2, 5, 48), (2, 5, 64), (RANK, 48), (64, RANK))
    given = [base.bfloat16(), x.bfloat16(), down, up]
    for each in given:
        each.requires_grad_()
    exact = [each.detach().double().requires_grad_() for each in given]
    expected = exact[0] + scaling * exact[1] @ exact[2].T @ exact[3].T
    found = add_adapter(given[0], given[1], factors(given[2], given[3]), scaling)
    assert float((found - expected).detach().norm() / expected.detach().norm()) < 2**-8
    # What the loss takes from the output is exact in bfloat16, as it is where it comes from a layer in bfloat16.
    weights = weights.bfloat16()
    (found * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    for each, oracle in zip(given, exact, strict=True):
        assert each.grad is not None
        assert oracle.grad is not None
        assert float((each.grad.double() - oracle.grad).norm() / oracle.grad.norm()) < 2**-7


def adapted(lora: LoraSettings = LORA, dtype: torch.dtype = torch.bfloat16) -> TrainedModel:
    model = train_model(tiny_llama().to(dtype), TrainingChoice(lora), base_name="some/base")
    disturb({name: each for name, each in model.trainable_parameters().items() if "magnitude" not in name})
    return model


def layers(model: TrainedModel) -> dict[str, Any]:
    """The layers with these products, by name."""
    named: Any = model.model.named_modules()
    return {name: each for name, each in named if "BFloat16" in str(getattr(each, "lora_variant", ""))}


def test_linear_layers_over_bfloat16_have_these_products_and_no_others() -> None:
    names = {name.rpartition(".")[2] for name in layers(adapted())}
    assert names == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert not layers(adapted(dtype=torch.float32))
    assert not layers(adapted(replace(LORA, targets=r".*_proj", use_dora=True)))


@pytest.mark.parametrize("lora", [LORA, replace(LORA, use_rslora=True)], ids=["plain", "rslora"])
def test_on_a_cpu_outputs_and_gradients_are_those_of_peft_to_the_bit(lora: LoraSettings) -> None:
    ours, of_peft = adapted(lora), adapted(lora)
    for layer in layers(of_peft).values():
        layer.lora_variant, layer.cast_input_dtype_enabled = {}, True
    with torch.no_grad(), ours.merged():
        sampled = logprobs(ours.model)
    found = [logprobs(each.model) for each in (ours, of_peft)]
    assert torch.equal(sampled, found[1])
    assert torch.equal(*found)
    for each in found:
        each.square().sum().backward()
    for (name, ours_own), of_pefts in zip(
        ours.trainable_parameters().items(), of_peft.trainable_parameters().values(), strict=True
    ):
        assert ours_own.grad is not None
        assert torch.equal(ours_own.grad, of_pefts.grad), name


@torch.no_grad()
def test_factors_are_kept_for_sampling_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by the device that the values pretend to be on."""
    model = adapted()
    layer = next(iter(layers(model).values()))
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    x, result = (each.bfloat16() for each in matrices((2, 5, 16), (2, 5, len(up))))
    variant = layer.lora_variant["default"]

    def found() -> Tensor:
        return variant.forward(layer, "default", x, result)  # type: ignore[no-any-return]

    with kept_factors(model.model):
        before = found()
        down.add_(1)
        assert torch.equal(found(), before)
    expected = result.double() + 1.5 * x.double() @ down.double().T @ up.double().T
    assert float((found().double() - expected).norm() / expected.norm()) < 2**-7
    assert not torch.allclose(found(), before, rtol=0.1)


def test_layers_with_a_bias_in_their_adapter_stay_as_they_are() -> None:
    model = adapted().model
    for layer in model.modules():
        if hasattr(layer, "lora_variant"):
            layer.lora_variant, layer.lora_bias = {}, {"default": True}
    use_bfloat16_products(model)
    assert not any(getattr(layer, "lora_variant", None) for layer in model.modules())
