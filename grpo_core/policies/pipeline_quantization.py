"""Which parts of a pipeline are in 4 or 8 bits, as diffusers loads them, and what cannot run here."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from grpo_core.errors import InputError
from grpo_core.policies.pipeline_files import find_model_file
from grpo_core.policies.trained.quantization import (
    PLACE,
    QuantizationSettings,
    quantized_size,
    read_stored,
    require_usable,
    stored_quantization,
)

if TYPE_CHECKING:
    import torch

Parts = Mapping[str, tuple[str, str]]
"""Library and class of each part of a pipeline, by the part's name."""

_LARGE = ("transformer", "text_encoder", "vision_language_encoder")
"""Beginnings of the names of the parts that are quantized unless the settings name others."""


def quantized_parts(parts: Parts, quantization: QuantizationSettings | None) -> tuple[str, ...]:
    """Return the names of the parts that are quantized.

    Raises:
        InputError: the settings name a part that the pipeline does not have, or that is no transformer.
    """
    if quantization is None:
        return ()
    can_be = tuple(name for name in parts if name.startswith(_LARGE))
    if unknown := set(quantization.components or ()) - set(can_be):
        hint = f"Of this pipeline {', '.join(can_be)} can be quantized."
        raise InputError(f"{PLACE}.components", sorted(unknown), hint)
    return can_be if quantization.components is None else quantization.components


def require_usable_parts(
    model: str,
    parts: Parts,
    quantization: QuantizationSettings | None,
    device: "torch.device",
    *,
    trained: Collection[str],
    adapters: bool,
) -> Mapping[str, QuantizationSettings]:
    """Return how each quantized part is quantized, by the settings or in its files.

    Args:
        model: folder or hub name, whose files are searched on this machine only.
        trained: names of the parts that are trained.
        adapters: whether by adapters alone.

    Raises:
        InputError: as `require_usable`, or diffusers cannot quantize a part on this device.
    """
    chosen, found = quantized_parts(parts, quantization), {}
    for name, (library, _) in parts.items():
        stored = read_stored(find_model_file(model, f"{name}/config.json"))
        own = quantization if name in chosen else None
        only_adapters = adapters or name not in trained
        usable = require_usable(f"{model}, {name}", stored, own, device, adapters=only_adapters)
        if usable is None:
            continue
        found[name] = usable
        if library == "diffusers" and device.type == "cpu":
            place, value = ("policy.model", model) if own is None else (f"{PLACE}.kind", usable.kind)
            others = [each for each in chosen if parts[each][0] != "diffusers"]
            left = f", or set policy.quantization.components to {others}" if others else ""
            hint = f"diffusers runs its models in 4 or 8 bits on a GPU only, and {name} is one; use a GPU{left}."
            raise InputError(place, value, hint)
    return found


def loading_options(
    parts: Parts,
    quantization: QuantizationSettings | None,
    dtype: "torch.dtype",
    device: "torch.device",
    skips: Callable[[str], list[str]],
) -> dict[str, Any]:
    """Return the arguments of a pipeline's from_pretrained that quantize its parts; none without quantization.

    Args:
        skips: the modules of a part of transformers that are not quantized, by the part's name.
    """
    if quantization is None:
        return {}
    import diffusers
    import transformers
    from diffusers.quantizers import PipelineQuantizationConfig

    of_weights, mapping = str(dtype).removeprefix("torch."), {}
    for name in quantized_parts(parts, quantization):
        if parts[name][0] == "diffusers":
            mapping[name] = diffusers.BitsAndBytesConfig(**quantization.arguments(of_weights))
        else:
            mapping[name] = transformers.BitsAndBytesConfig(**quantization.arguments(of_weights, skips(name)))
    return {"quantization_config": PipelineQuantizationConfig(quant_mapping=mapping), "device_map": device.type}


def quantized_sizes(
    model: str,
    parts: Parts,
    networks: Mapping[str, Any],
    quantization: QuantizationSettings | None,
    skips: Callable[[str], list[str]],
) -> dict[str, tuple[int, int]]:
    """Return the number of quantized weights of each quantized part, and their bytes.

    Args:
        networks: on the meta device, by the part's name; without adapters.
        skips: as in `loading_options`.

    Raises:
        InputError: as `quantized_parts` and `stored_quantization`.
    """
    chosen, found = quantized_parts(parts, quantization), {}
    for name, network in networks.items():
        stored = stored_quantization(model, read_stored(find_model_file(model, f"{name}/config.json")))
        own = quantization if name in chosen else stored
        if own is not None:
            found[name] = quantized_size(network, own, skips(name))
    return found
