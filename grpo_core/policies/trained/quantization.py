"""Frozen networks in 4 bits under adapters: their settings, what is refused, and the layers of bitsandbytes."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Strict

from grpo_core.errors import InputError
from grpo_core.pipeline_files import Parts, find_model_file
from grpo_core.uses import Uses

if TYPE_CHECKING:
    import torch
    from torch import nn

QuantizationKind = Literal["nf4", "fp4"]
PLACE = "policy.quantization"

_LARGE = ("transformer", "text_encoder", "vision_language_encoder")
"""Beginnings of the names of the parts of a pipeline that are quantized unless the settings name others."""

BYTES_IN_4_BITS = 0.53
"""Bytes of a weight in 4 bits with its share of the scales."""


@dataclass(frozen=True)
class QuantizationSettings:
    """The frozen weights in 4 bits of bitsandbytes, while adapters are trained (QLoRA).

    Attributes:
        kind: nf4 (Dettmers et al., 2023, arXiv:2305.14314), or fp4.
        double_quant: keep the scales in 8 bits (bnb_4bit_use_double_quant).
        compute_dtype: of the matrix products (bnb_4bit_compute_dtype); None: policy.dtype.
        skip_modules: modules that stay as they are, beside output heads, embeddings, norms and the vision towers of
            token models (llm_int8_skip_modules).
        components: parts of a pipeline that are quantized; None: its transformers, token model and text encoders.
    """

    kind: QuantizationKind
    double_quant: bool = False
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    skip_modules: Annotated[tuple[str, ...], Strict(False), Uses.NOTHING] = ()
    components: Annotated[tuple[str, ...], Strict(False), Uses.NOTHING] | None = None

    def __post_init__(self) -> None:
        if self.components == ():
            raise InputError(f"{PLACE}.components", [], "Nothing would be quantized; leave policy.quantization out.")

    def computes_in_fp32(self, dtype: str) -> bool:
        """Return whether products round no more than fp32, `dtype` being that of the other weights."""
        return (self.compute_dtype or dtype) == "float32"

    def arguments(self, dtype: str, skip: Iterable[str] = ()) -> dict[str, Any]:
        """Return the arguments of BitsAndBytesConfig; `skip` names more modules that stay as they are."""
        skipped = [*dict.fromkeys((*skip, *self.skip_modules))]
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_compute_dtype": self.compute_dtype or dtype,
            **({"llm_int8_skip_modules": skipped} if skipped else {}),
        }

    @property
    def description(self) -> str:
        """The quantization in a few words."""
        double = " with double quantization" if self.double_quant else ""
        compute = f", computed in {self.compute_dtype}" if self.compute_dtype else ""
        return f"{self.kind}{double}{compute}"


def refuse_adapters(quantization: QuantizationSettings, lora: Any, place: str = "policy.lora") -> None:
    """Raise InputError for adapters that cannot be trained over a quantized base; None: every weight is trained."""
    if lora is None:
        hint = "Quantized weights cannot be trained; set policy.lora to {rank: 32}, or leave this out."
        raise InputError(f"{PLACE}.kind", quantization.kind, hint)
    if lora.init_lora_weights not in (True, "gaussian"):
        hint = "It moves a part of each weight into the adapter, and the rest would be rounded again; use true."
        raise InputError(f"{place}.init_lora_weights", lora.init_lora_weights, hint)


def quantized_parts(parts: Parts, quantization: QuantizationSettings | None) -> tuple[str, ...]:
    """Return the names of the parts that are quantized; InputError for one that is missing, or cannot be."""
    if quantization is None:
        return ()
    can_be = tuple(name for name in parts if not name or name.startswith(_LARGE))
    if unknown := set(quantization.components or ()) - set(can_be):
        hint = f"Of this pipeline {', '.join(can_be)} can be quantized."
        raise InputError(f"{PLACE}.components", sorted(unknown), hint)
    return can_be if quantization.components is None else quantization.components


def refuse_unusable_weights(
    model: str,
    parts: Parts,
    quantization: QuantizationSettings | None,
    device: "torch.device",
    *,
    trained: Collection[str],
    adapters: bool,
) -> None:
    """Raise InputError for weights that cannot be quantized as chosen on this device, or, in trained parts, trained."""
    chosen = quantized_parts(parts, quantization)
    for name, (library, _) in parts.items():
        stored, where = stored_kind(model, name), f"{model}, {name}" if name else model
        own = quantization if name in chosen else None
        if stored is not None and own is not None:
            hint = f"The weights of {where} are stored in {stored} already; leave policy.quantization out."
            raise InputError(f"{PLACE}.kind", own.kind, hint)
        if stored is not None and name in trained and not adapters:
            hint = f"The weights of {where} are stored in {stored} and cannot be trained; set policy.lora."
            raise InputError("policy.lora", None, hint)
        if stored is None and own is None:
            continue
        place, value = ("policy.model", model) if own is None else (f"{PLACE}.kind", own.kind)
        if find_spec("bitsandbytes") is None:
            hint = "It needs bitsandbytes, the extra of that name (pip install bitsandbytes); or leave it out."
            raise InputError(place, value, hint)
        if device.type not in ("cuda", "cpu"):
            raise InputError(place, value, f"bitsandbytes was not tried on {device.type}; use cuda or cpu.")
        if library == "diffusers" and device.type == "cpu":
            others = [each for each in chosen if parts[each][0] != "diffusers"]
            left = f", or set policy.quantization.components to {others}" if others else ""
            hint = f"diffusers runs its models in 4 bits on a GPU only, and {name} is one; use a GPU{left}."
            raise InputError(place, value, hint)


def stored_kind(model: str, part: str) -> str | None:
    """Return how the stored weights of a part are quantized; None if not, InputError for what was not tried here."""
    values = read_stored(find_model_file(model, f"{part}/config.json".removeprefix("/")))
    if not values:
        return None
    if values.get("load_in_4bit"):
        return str(values.get("bnb_4bit_quant_type", "fp4"))
    how = f"{values.get('quant_method')}{' in 8 bits' if values.get('load_in_8bit') else ''}"
    hint = (
        f"Its weights are quantized by {how}, over which no adapters were tried here; give the model without that, and "
        "policy.quantization, or weights that bitsandbytes stored in 4 bits."
    )
    raise InputError("policy.model", model, hint)


def read_stored(file: Path | None) -> Any:
    """Return quantization_config of a config.json; None without one, or without the file."""
    try:
        return None if file is None else json.loads(file.read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        # A damaged file is reported with what it is needed for.
        return None


def skipped_modules(network: Any, left_alone: Callable[[Any], Iterable[Any]] = lambda network: ()) -> list[str]:
    """Return the names of the modules of a network of transformers, without adapters, that are not quantized.

    These are the output head, tied weights, and modules of the parameters that `left_alone` returns.
    """
    from transformers.quantizers.base import get_keys_to_not_convert

    alone, found = frozenset(map(id, left_alone(network))), list[str]()
    for name, module in network.named_modules():
        own = [id(parameter) for parameter in module.parameters()]
        covered = any(name.startswith(f"{each}.") for each in found)
        if own and not covered and alone.issuperset(own):
            found.append(name)
    return sorted(get_keys_to_not_convert(network)) + found


def count_quantized(
    model: str,
    parts: Parts,
    networks: Mapping[str, Any],
    quantization: QuantizationSettings | None,
    left_alone: Callable[[Any], Iterable[Any]] = lambda network: (),
) -> dict[str, int]:
    """Return the number of quantized weights of each quantized part, of networks on the meta device by name."""
    from torch import nn
    from transformers.quantizers.quantizers_utils import should_convert_module

    chosen, found = quantized_parts(parts, quantization), {}
    for part, network in networks.items():
        if part not in chosen and stored_kind(model, part) is None:
            continue
        own = skipped_modules(network, left_alone) if parts[part][0] == "transformers" else []
        linear = ((name, each) for name, each in network.named_modules() if type(each) is nn.Linear)
        skip = [*own, *(quantization.skip_modules if quantization is not None else ())]
        weights = {id(each.weight): each.weight for name, each in linear if should_convert_module(name, skip)}
        found[part] = sum(weight.numel() for weight in weights.values())
    return found


def quantized_loading(
    parts: Parts,
    quantization: QuantizationSettings | None,
    dtype: "torch.dtype",
    build: Callable[[str], Any],
    left_alone: Callable[[Any], Iterable[Any]] = lambda network: (),
) -> dict[str, Any]:
    """Return bitsandbytes' configuration for loading each quantized part, which `build` makes on the meta device."""
    if quantization is None:
        return {}
    import diffusers
    import transformers

    found: dict[str, Any] = {}
    for part in quantized_parts(parts, quantization):
        of_diffusers = parts[part][0] == "diffusers"
        skip = () if of_diffusers else skipped_modules(build(part), left_alone)
        config = diffusers.BitsAndBytesConfig if of_diffusers else transformers.BitsAndBytesConfig
        found[part] = config(**quantization.arguments(str(dtype).removeprefix("torch."), skip))
    return found


def is_quantized(module: "nn.Module") -> bool:
    """Return whether this is a layer of bitsandbytes."""
    return type(module).__module__.partition(".")[0] == "bitsandbytes"


def quantized_layers(model: "nn.Module") -> Iterator[Any]:
    """Yield the layers of bitsandbytes."""
    return (module for module in model.modules() if is_quantized(module))


def prepare_layers(model: "nn.Module", settings: QuantizationSettings | None) -> None:
    """Let quantized layers compute the same while sampling and scoring, with gradients.

    On a CPU with AVX512-BF16, the first pass without gradients would repack 4-bit weights for good, into a layout whose
    products are others and have no gradient (bitsandbytes 0.50, Linear4bit.forward). InputError if no layer is
    quantized despite the settings.
    """
    layers = list(quantized_layers(model))
    if settings is not None and not layers:
        hint = f"{type(model).__name__} has no linear layer outside the skipped modules; leave policy.quantization out."
        raise InputError(f"{PLACE}.kind", settings.kind, hint)
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
