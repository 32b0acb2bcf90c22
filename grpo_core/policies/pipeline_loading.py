"""Pipelines of diffusers by folder or hub name: one network without weights or alone, or all of them, frozen."""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.quantizers import PipelineQuantizationConfig
from safetensors import SafetensorError
from torch import Tensor, nn

from grpo_core.errors import InputError, first_line
from grpo_core.pipeline_files import Parts, refuse_missing_folder
from grpo_core.policies.trained.quantization import QuantizationSettings, prepare_layers, quantized_loading

_LIBRARIES = {"diffusers": diffusers, "transformers": transformers}
_MOVABLE = ("transformer", "vision_language_encoder", "text_encoder", "vae")
"""Beginnings of the names of the parts that can be off the device."""


def part_class(parts: Parts, part: str) -> Any:
    """Return the class of a part; None if neither diffusers nor transformers has it."""
    library, name = parts[part]
    return getattr(_LIBRARIES.get(library), name, None)


def is_network(parts: Parts, part: str) -> bool:
    """Whether a part has weights; tokenizers and schedulers have none."""
    found = part_class(parts, part)
    return isinstance(found, type) and issubclass(found, nn.Module)


def read_part_config(folder: Path, parts: Parts, part: str) -> Any:
    """Read a network's configuration, a mapping for diffusers, an object for transformers; or InputError."""
    # For a missing file transformers returns the defaults of the class.
    if not (folder / part / "config.json").is_file():
        hint = f"It has no {part}/config.json; give the folder of a complete saved pipeline."
        raise InputError("policy.model", str(folder), hint)
    network = part_class(parts, part)
    of_diffusers = parts[part][0] == "diffusers"
    read = network.load_config if of_diffusers else network.config_class.from_pretrained
    try:
        return read(folder, subfolder=part, local_files_only=True)
    except OSError as error:
        hint = f"Give the folder of a complete saved pipeline ({first_line(error)})."
        raise InputError("policy.model", str(folder), hint) from error


def build_on_meta(folder: Path, parts: Parts, part: str) -> Any:
    """Build a network of a pipeline's folder on the meta device, or raise InputError; no weights are opened."""
    config, network = read_part_config(folder, parts, part), part_class(parts, part)
    with torch.device("meta"):
        return network.from_config(config) if parts[part][0] == "diffusers" else network(config)


def load_network(model: str, parts: Parts, part: str, dtype: torch.dtype) -> Any:
    """Load one network of a saved pipeline alone, on the CPU."""
    transformers.utils.logging.disable_progress_bar()
    return part_class(parts, part).from_pretrained(model, subfolder=part, dtype=dtype, use_safetensors=True)


def initial_state_of(model: str, parts: Parts, part: str, dtype: torch.dtype) -> Callable[[], dict[str, Tensor]]:
    """Return a function that reads the weights of one network again."""

    def read() -> dict[str, Tensor]:
        state: dict[str, Tensor] = load_network(model, parts, part, dtype).state_dict()
        return state

    return read


def load_pipeline(
    model: str,
    read: Callable[..., Any],
    parts: Parts,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizationSettings | None = None,
    offloaded: Collection[str] = (),
    left_alone: Callable[[Any], Iterable[Any]] = lambda network: (),
) -> Any:
    """Load a pipeline with all its networks frozen, in evaluation mode.

    Args:
        read: loads the pipeline from safetensors, without code of its own, with these arguments of from_pretrained.
        folder: with the configurations of its parts.
        quantization: of its large networks, or of those that it names; None: as they are stored.
        offloaded: names of the parts that are left where they are loaded, in CPU memory unless they are quantized.
        left_alone: returns the parameters of a network that are never quantized, beside the usual ones.

    Raises:
        InputError: its files are missing, damaged or not reachable.
    """
    refuse_missing_folder(model)
    quantized = quantized_loading(parts, quantization, dtype, partial(build_on_meta, folder, parts), left_alone)
    options: dict[str, Any] = {"dtype": dtype}
    if quantized:
        options["quantization_config"] = PipelineQuantizationConfig(quant_mapping=quantized)
        options["device_map"] = device.type
    # Their progress bars would break ours.
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        pipeline = read(**options)
    except InputError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        hint = "Give a folder with complete files, or a hub name whose files are cached or reachable"
        raise InputError("policy.model", model, f"{hint} ({first_line(error)}).") from error
    pipeline.set_progress_bar_config(disable=True)
    for name, part in pipeline.components.items():
        if isinstance(part, nn.Module):
            part.requires_grad_(False)
            part.eval()
            prepare_layers(part, quantization if name in quantized else None)
            if offloaded and name not in offloaded:
                part.to(device)
    return pipeline if offloaded else pipeline.to(device)


def offloaded_parts(parts: Parts, full: Collection[str]) -> tuple[str, ...]:
    """Return the names of the parts that can be off the device, except those in `full`, whose weights are trained."""
    return tuple(name for name in parts if name.startswith(_MOVABLE) and name not in full and is_network(parts, name))
