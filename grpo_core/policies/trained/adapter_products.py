"""Products of LoRA layers over a base in bfloat16, on a GPU: in bfloat16 with the adapters' precision kept.

peft multiplies adapters in fp32, as they are stored, which takes up to fifteen times as long on a GPU; TF32 is a
setting of the process and would reach the routers of experts too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from peft.tuners.lora import Linear
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor, nn

Factors = tuple[Float[Tensor, "three_ranks inputs"], Float[Tensor, "outputs three_ranks"]]


class BFloat16Products(LoraVariant):
    """peft's hook for another forward pass of a LoRA layer; on a CPU it computes what peft does, to the bit."""

    kept: Factors | None = None

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        """Add the adapter's output to the base's."""
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scaling = module.scaling[active_adapter]
        if not x.is_cuda or x.dtype != torch.bfloat16:
            exact: Tensor = result + up(down(x.to(down.weight.dtype))) * scaling
            return exact
        return add_adapter(result, x, self.kept or factors(down.weight, up.weight), scaling)


def factors(down: Float[Tensor, "rank inputs"], up: Float[Tensor, "outputs rank"]) -> Factors:
    """Return two matrices in bfloat16 whose product is that of the adapter in fp32, but for 2^-16 of each value.

    Each value is a sum of two in bfloat16; the product of their smaller halves is left out. Rounded to bfloat16 alone,
    an adapter would miss two or three percent of what a small step changes.
    """
    made: Factors = _Factors.apply(down, up)
    return made


class _Factors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, down: Tensor, up: Tensor) -> Factors:
        ctx.rank = rank = len(down)
        wide = down.new_empty(3 * rank, down.shape[1], dtype=torch.bfloat16)
        tall = up.new_empty(len(up), 3 * rank, dtype=torch.bfloat16)
        down_high, down_low, down_again = wide.split(rank)
        up_high, up_again, up_low = tall.split(rank, 1)
        for values, high, low, again in ((down, down_high, down_low, down_again), (up, up_high, up_low, up_again)):
            high.copy_(values)
            torch.sub(values, high, out=low)
            again.copy_(high)
        return wide, tall

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Give each adapter the gradient of its larger halves where both others are too: the rest is below rounding."""
        wide, tall = gradients
        return wide[: ctx.rank].float(), tall[:, : ctx.rank].float()


def add_adapter(
    result: Float[Tensor, "*rows outputs"], x: Float[Tensor, "*rows inputs"], factors: Factors, scaling: float
) -> Float[Tensor, "*rows outputs"]:
    """Return result + scaling * x @ down^T @ up^T in bfloat16, rounded once after the sum, and once between them."""
    down, up = factors
    hidden = nn.functional.linear(x, down).flatten(0, -2)
    return torch.addmm(result.flatten(0, -2), hidden, up.T, alpha=scaling).view_as(result)


def use_bfloat16_products(model: nn.Module) -> None:
    """Let LoRA layers over a linear layer in bfloat16 use these products; variants such as DoRA stay as they are."""
    for layer in _layers(model):
        if layer.lora_variant or any(layer.lora_bias.values()):
            continue
        if layer.get_base_layer().weight.dtype == torch.bfloat16:
            layer.cast_input_dtype_enabled = False
            layer.lora_variant = {name: BFloat16Products() for name in layer.lora_A}


@contextmanager
def kept_factors(model: nn.Module) -> Iterator[None]:
    """Make the factors once for all passes inside, which neither change adapters nor compute gradients."""
    variants = [
        (layer, name, variant)
        for layer in _layers(model)
        for name, variant in layer.lora_variant.items()
        if isinstance(variant, BFloat16Products) and layer.lora_A[name].weight.is_cuda
    ]
    try:
        with torch.no_grad():
            for layer, name, variant in variants:
                variant.kept = factors(layer.lora_A[name].weight, layer.lora_B[name].weight)
        yield
    finally:
        for _, _, variant in variants:
            variant.kept = None


def _layers(model: nn.Module) -> Iterator[Any]:
    # Subclasses, and the layers of quantized weights, have a forward pass of their own.
    return (layer for layer in model.modules() if type(layer) is Linear)
