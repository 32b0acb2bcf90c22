"""A frozen base in 4 or 8 bits under adapters: its settings, what is refused, and the layers of bitsandbytes."""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import NonNegativeFloat, Strict

from grpo_core.errors import InputError
from grpo_core.uses import Uses

if TYPE_CHECKING:
    import torch
    from torch import nn

QuantizationKind = Literal["nf4", "fp4", "int8"]
PLACE = "policy.quantization"

_BLOCK, _NESTED_BLOCK = 64, 256
"""Weights, and scales of weights, that share a scale in bitsandbytes' 4 bits."""

_TABLES: Mapping[bool, int] = MappingProxyType({False: 16 * 4, True: (16 + 256 + 1) * 4})
"""Bytes of the tables of a matrix in 4 bits, by double_quant: its 16 levels, the 256 of its scales, their mean."""


@dataclass(frozen=True)
class QuantizationSettings:
    """The frozen weights in 4 or 8 bits of bitsandbytes, while adapters are trained.

    Attributes:
        kind: nf4 (QLoRA; Dettmers et al., 2023, arXiv:2305.14314), fp4, or int8 (LLM.int8(); Dettmers et al., 2022,
            arXiv:2208.07339), which rounds activations to 8 bits too.
        double_quant: of nf4 and fp4: keep the scales in 8 bits, as bnb_4bit_use_double_quant.
        compute_dtype: of nf4 and fp4: of the matrix products, as bnb_4bit_compute_dtype; None: policy.dtype.
        int8_threshold: of int8: activations from this on are multiplied in 16 bits, as llm_int8_threshold. Which
            columns these are depends on all rows of a batch, so that log-probs of sampling and of scoring differ;
            0: none, and every row stands alone.
        skip_modules: names of modules that stay as they are, as llm_int8_skip_modules; output heads, embeddings, norms
            and the vision towers of token models do in any case.
        components: parts of a pipeline that are quantized; None: its transformers, token model and text encoders.
    """

    kind: QuantizationKind
    double_quant: bool = False
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    int8_threshold: NonNegativeFloat = 0.0
    skip_modules: Annotated[tuple[str, ...], Strict(False), Uses.NOTHING] = ()
    components: Annotated[tuple[str, ...], Strict(False), Uses.NOTHING] | None = None

    @property
    def in_4_bits(self) -> bool:
        """Whether a weight has 4 bits."""
        return self.kind != "int8"

    def __post_init__(self) -> None:
        """Refuse settings of the other kinds.

        Raises:
            InputError: names the setting.
        """
        if self.kind == "int8" and (self.double_quant or self.compute_dtype is not None):
            name, value = ("double_quant", True) if self.double_quant else ("compute_dtype", self.compute_dtype)
            raise InputError(f"{PLACE}.{name}", value, "Only nf4 and fp4 have it; leave it out.")
        if self.in_4_bits and self.int8_threshold:
            raise InputError(f"{PLACE}.int8_threshold", self.int8_threshold, "Only int8 has it; leave it out.")
        if self.components == ():
            raise InputError(f"{PLACE}.components", [], "Nothing would be quantized; leave policy.quantization out.")

    def computes_in_fp32(self, dtype: str) -> bool:
        """Return whether products of such weights round no more than fp32.

        Args:
            dtype: of the weights that are not quantized.
        """
        return self.in_4_bits and (self.compute_dtype or dtype) == "float32"

    def arguments(self, dtype: str, skip: Iterable[str] = ()) -> dict[str, Any]:
        """Return the arguments of BitsAndBytesConfig, of transformers and of diffusers.

        Args:
            dtype: of the weights that are not quantized.
            skip: modules that stay as they are, beside `skip_modules`.
        """
        skipped = [*dict.fromkeys((*skip, *self.skip_modules))]
        left_out = {"llm_int8_skip_modules": skipped} if skipped else {}
        if not self.in_4_bits:
            return {"load_in_8bit": True, "llm_int8_threshold": self.int8_threshold, **left_out}
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_compute_dtype": self.compute_dtype or dtype,
            **left_out,
        }

    def bytes_of(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix with its scales."""
        if not self.in_4_bits:
            return rows * columns + 4 * rows
        blocks = -(-rows * columns // _BLOCK)
        scales = blocks + 4 * -(-blocks // _NESTED_BLOCK) if self.double_quant else 4 * blocks
        return math.ceil(rows * columns / 2) + scales + _TABLES[self.double_quant]

    @property
    def description(self) -> str:
        """The quantization in a few words."""
        double = " with double quantization" if self.double_quant else ""
        compute = f", computed in {self.compute_dtype}" if self.compute_dtype else ""
        return f"{self.kind}{double}{compute}"


def refuse_adapters(quantization: QuantizationSettings, lora: Any, place: str = "policy.lora") -> None:
    """Refuse adapters that cannot be trained over a quantized base.

    Args:
        lora: the settings of the adapters; None: every weight is trained.
        place: of these settings.

    Raises:
        InputError: names the setting.
    """
    if lora is None:
        hint = "Quantized weights cannot be trained; set policy.lora to {rank: 32}, or leave this out."
        raise InputError(f"{PLACE}.kind", quantization.kind, hint)
    if lora.use_dora and not quantization.in_4_bits:
        hint = "peft loses the scales of an int8 layer when it computes DoRA's magnitudes; use nf4, or no DoRA."
        raise InputError(f"{place}.use_dora", True, hint)
    if lora.init_lora_weights not in (True, "gaussian"):
        hint = "It moves a part of each weight into the adapter, and the rest would be rounded again; use true."
        raise InputError(f"{place}.init_lora_weights", lora.init_lora_weights, hint)


def require_usable(
    model: str,
    stored: Any,
    quantization: QuantizationSettings | None,
    device: "torch.device",
    *,
    adapters: bool,
) -> QuantizationSettings | None:
    """Return how the weights of a network are quantized, by the settings or in its files; None if they are not.

    Args:
        model: folder or hub name, for errors.
        stored: quantization_config of its config.json; None without one.
        adapters: whether nothing but adapters of the network is trained.

    Raises:
        InputError: it is quantized twice, or in a way that cannot run here, or all of its weights are to be trained.
    """
    own = stored_quantization(model, stored)
    if own is not None and quantization is not None:
        hint = f"The weights of {model} are stored in {own.kind} already; leave policy.quantization out."
        raise InputError(f"{PLACE}.kind", quantization.kind, hint)
    if own is not None and not adapters:
        hint = f"The weights of {model} are stored in {own.kind} and cannot be trained; set policy.lora."
        raise InputError("policy.lora", None, hint)
    if own is not None or quantization is not None:
        place, value = ("policy.model", model) if quantization is None else (f"{PLACE}.kind", quantization.kind)
        if find_spec("bitsandbytes") is None:
            hint = "It needs bitsandbytes, the extra of that name (pip install bitsandbytes); or leave it out."
            raise InputError(place, value, hint)
        if device.type not in ("cuda", "cpu"):
            raise InputError(place, value, f"bitsandbytes was not tried on {device.type}; use cuda or cpu.")
    return quantization or own


def stored_quantization(model: str, stored: Any) -> QuantizationSettings | None:
    """Return how stored weights are quantized; None if they are not.

    Args:
        stored: quantization_config of config.json.

    Raises:
        InputError: it is a method under which nothing was trained here.
    """
    if not stored:
        return None
    values: Mapping[str, Any] = stored if isinstance(stored, Mapping) else stored.to_dict()
    if values.get("load_in_8bit"):
        return QuantizationSettings("int8")
    if values.get("load_in_4bit"):
        kind: Any = values.get("bnb_4bit_quant_type", "fp4")
        compute = str(values.get("bnb_4bit_compute_dtype", "float32")).removeprefix("torch.")
        double = bool(values.get("bnb_4bit_use_double_quant", False))
        return QuantizationSettings(kind, double, "bfloat16" if compute == "bfloat16" else None)
    hint = (
        f"Its weights are quantized by {values.get('quant_method')}, over which no adapters were tried here; give the "
        "model without that, and policy.quantization, or weights stored by bitsandbytes."
    )
    raise InputError("policy.model", model, hint)


def read_stored(file: Path | None) -> Any:
    """Return quantization_config of a config.json; None without one, or without the file."""
    try:
        return None if file is None else json.loads(file.read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        # A damaged file is reported with what it is needed for.
        return None


def default_skips(model: Any, left_alone: Iterable[int] = ()) -> list[str]:
    """Return the names of the modules of a transformers model that are not quantized.

    Args:
        model: on any device, without adapters.
        left_alone: ids of parameters whose modules are left alone beside the output head and tied weights.
    """
    from transformers.quantizers.base import get_keys_to_not_convert

    alone, found = frozenset(left_alone), list[str]()
    for name, module in model.named_modules():
        own = [id(parameter) for parameter in module.parameters()]
        covered = any(name.startswith(f"{each}.") for each in found)
        if own and not covered and alone.issuperset(own):
            found.append(name)
    return sorted(get_keys_to_not_convert(model)) + found


def quantized_size(model: "nn.Module", settings: QuantizationSettings, skip: Iterable[str]) -> tuple[int, int]:
    """Return the number of weights that would be quantized, and their bytes with scales.

    Args:
        model: on the meta device, not quantized.
        skip: as in `QuantizationSettings.arguments`.
    """
    from torch import nn
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = [*skip, *settings.skip_modules]
    layers = {
        id(each.weight): each
        for name, each in model.named_modules()
        if type(each) is nn.Linear and should_convert_module(name, skipped)
    }
    sizes = [(each.out_features, each.in_features) for each in layers.values()]
    return sum(rows * columns for rows, columns in sizes), sum(settings.bytes_of(*each) for each in sizes)


def is_quantized(module: "nn.Module") -> bool:
    """Return whether this is a layer of bitsandbytes."""
    return type(module).__module__.partition(".")[0] == "bitsandbytes"


def quantized_layers(model: "nn.Module") -> Iterator[Any]:
    """Yield the layers of bitsandbytes."""
    return (module for module in model.modules() if is_quantized(module))


def prepare_layers(model: "nn.Module", settings: QuantizationSettings | None) -> None:
    """Let quantized layers compute the same while sampling and scoring, with gradients.

    On a CPU with AVX512-BF16, the first pass without gradients would repack 4-bit weights for good, into a layout whose
    products are others and have no gradient (bitsandbytes 0.50, Linear4bit.forward).

    Args:
        settings: that it was loaded with; None for weights that were stored as they are, which may have none.

    Raises:
        InputError: it was to be quantized, and no layer is.
    """
    layers = list(quantized_layers(model))
    if settings is not None and not layers:
        hint = f"{type(model).__name__} has no linear layer outside the skipped modules; leave policy.quantization out."
        raise InputError(f"{PLACE}.kind", settings.kind, hint)
    for layer in layers:
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
        else:
            layer.state.threshold = settings.int8_threshold if settings is not None else 0.0
    # One line for each layer and pass says that activations are rounded, which is what int8 means.
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")
