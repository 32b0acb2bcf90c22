"""A pipeline by folder or hub name, its networks on the meta device, and the pipeline with trained weights."""

import inspect
import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.policies.denoising.rows import load_frozen
from grpo_core.policies.diffusers.saved_pipeline import SavedPipeline, read_saved_pipeline
from grpo_core.policies.pipeline_files import INDEX_FILE, find_model_file, refuse_missing_folder
from grpo_core.policies.pipeline_quantization import loading_options, quantized_parts, require_usable_parts
from grpo_core.policies.trained.component import refuse_unavailable_attention
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.quantization import QuantizationSettings, default_skips, prepare_layers
from grpo_core.policies.trained.settings import TrainingChoice

TRANSFORMER = "transformer"
_IN_BLOCKS = re.compile(
    r".+\.\d+\.(?:(?:attn\d?|\w*attention|ff\w*|feed_forward|\w*mlp)\..+|(?:gate|up|down)_proj|proj_mlp|proj_out)"
)
"""Attention and feed-forward layers of a block, by the names that models of diffusers give them; no modulation."""

_BACKENDS = {"sdpa": "native", "flash_attention_2": "flash", "flex_attention": "flex"}


def require_saved_pipeline(model: str) -> SavedPipeline:
    """Read the configuration files of a pipeline that has to be on this machine.

    Raises:
        InputError: no such files, or a pipeline that cannot be trained.
    """
    refuse_missing_folder(model)
    saved = read_saved_pipeline(model)
    if saved is None:
        raise InputError(
            "policy.model",
            model,
            "Its files are not on this machine; give a saved pipeline's folder, or a hub name that can be reached.",
        )
    return saved


def require_usable_weights(
    model: str,
    saved: SavedPipeline,
    quantization: QuantizationSettings | None,
    device: torch.device,
    *,
    adapters: bool,
) -> Mapping[str, QuantizationSettings]:
    """Return how each quantized part is quantized; arguments and errors as `require_usable_parts`."""
    return require_usable_parts(model, saved.parts, quantization, device, trained=(TRANSFORMER,), adapters=adapters)


def absent_parts(model: str, saved: SavedPipeline) -> dict[str, None]:
    """Return the parts that a pipeline was saved without, of those that the constructor of its class has to be given.

    diffusers fails without them, where its user does not give them as None.

    Raises:
        InputError: names a part that the class cannot do without.
    """
    found, spared = getattr(diffusers, saved.class_name), saved.pipeline_class.can_lack
    wanted = [each for each in inspect.signature(found.__init__).parameters.values() if each.name != "self"]
    needed = {each.name for each in wanted if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD}
    absent = needed - saved.parts.keys()
    spared = spared if absent.issuperset(spared[:1]) else ()
    if missing := sorted(absent.difference(found._optional_components, spared)):
        hint = f"Its {INDEX_FILE} has no {' and no '.join(missing)}; save it with all that a {saved.class_name} needs."
        raise InputError("policy.model", model, hint)
    return dict.fromkeys(sorted(absent))


def modules_in_full(model: str, saved: SavedPipeline, part: str) -> list[str]:
    """Return the modules of a part of transformers that are never quantized."""
    return [] if saved.parts[part][0] == "diffusers" else default_skips(build_on_meta(model, saved, part))


def load_pipeline(
    model: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizationSettings | None = None,
    offloaded: Collection[str] = (),
) -> Any:
    """Load all parts of a pipeline, frozen, in evaluation mode.

    Args:
        model: a folder written by `save_pretrained`, or a hub name such as stabilityai/stable-diffusion-3.5-medium.
        quantization: of its transformer and text encoders, or of those that it names; None: as they are stored.
        offloaded: names of the parts that are left where they are loaded, in CPU memory unless they are quantized.

    Raises:
        InputError: the folder does not exist, files are missing, or it is not a pipeline that can be trained.
    """
    refuse_missing_folder(model)

    def read() -> Any:
        DiffusionPipeline.load_config(model)
        # Read before the weights: what cannot be trained is refused first.
        saved = require_saved_pipeline(model)
        options = loading_options(saved.parts, quantization, dtype, device, partial(modules_in_full, model, saved))
        options |= absent_parts(model, saved)
        return DiffusionPipeline.from_pretrained(
            model, dtype=dtype, use_safetensors=True, trust_remote_code=False, **options
        )

    pipeline = load_frozen(model, read, device, offloaded)
    saved = require_saved_pipeline(model)
    chosen = quantized_parts(saved.parts, quantization)
    for name in (each for each in saved.parts if is_network(saved, each)):
        prepare_layers(getattr(pipeline, name), quantization if name in chosen else None)
    return pipeline


def use_attention(transformer: Any, name: str | None) -> None:
    """Let a model of diffusers compute attention with this implementation; None leaves the default.

    Args:
        name: as transformers calls it.

    Raises:
        InputError: its package is missing, or models of diffusers do not have it.
    """
    refuse_unavailable_attention(name)
    if name is None:
        return
    if name not in _BACKENDS:
        hint = f"Models of diffusers do not have it; use one of {', '.join(_BACKENDS)}, or leave it out."
        raise InputError("policy.attn_implementation", name, hint)
    try:
        transformer.set_attention_backend(_BACKENDS[name])
    except (ValueError, RuntimeError, ImportError) as error:
        raise InputError("policy.attn_implementation", name, f"It is not available here ({error}).") from error


def train_transformer(transformer: Any, choice: TrainingChoice, model: str, **options: Any) -> TrainedModel:
    """Make the chosen part of a pipeline's transformer trainable; other arguments and errors as in `train_model`.

    Args:
        model: folder or hub name, written into saved adapters.
    """
    targets = default_targets(transformer) if choice.lora is not None and choice.lora.targets is None else None
    return train_model(transformer, choice, base_name=model, default_targets=targets, **options)


def default_targets(transformer: nn.Module) -> str:
    """Return a regular expression for the attention and feed-forward layers of all blocks.

    Raises:
        InputError: the transformer has no layers by their usual names.
    """
    linear = (name for name, each in transformer.named_modules() if isinstance(each, nn.Linear))
    found = dict.fromkeys(re.sub(r"\.\d+\.", "|", name, count=1) for name in linear if _IN_BLOCKS.fullmatch(name))
    if not found:
        hint = f"{type(transformer).__name__} names the layers of its blocks in its own way; give a regular expression."
        raise InputError("policy.lora.targets", None, hint)
    return "|".join(re.escape(name).replace(r"\|", r"\.\d+\.") for name in found)


def build_on_meta(model: str, saved: SavedPipeline, part: str = TRANSFORMER) -> Any:
    """Build a network of the pipeline on the meta device: every shape and name, no memory and no values.

    Args:
        part: name of a part that is a network.
    """
    library, name = saved.parts[part]
    network = getattr({"diffusers": diffusers, "transformers": transformers}[library], name)
    file = find_model_file(model, f"{part}/config.json")
    assert file is not None
    if library == "diffusers":
        config = network.load_config(file.parent)
        with torch.device("meta"):
            return network.from_config(config)
    config = network.config_class.from_pretrained(file.parent)
    with torch.device("meta"):
        return network(config)


def is_network(saved: SavedPipeline, part: str) -> bool:
    """Whether a part of the pipeline has weights; tokenizers and schedulers have none."""
    library, name = saved.parts[part]
    found = getattr({"diffusers": diffusers, "transformers": transformers}.get(library), name, None)
    return isinstance(found, type) and issubclass(found, nn.Module)


def offloaded_parts(saved: SavedPipeline, choice: TrainingChoice) -> tuple[str, ...]:
    """Return the names of the parts that can be off the device: encoders, autoencoder, and a transformer with adapters.

    Others, and a transformer whose own weights are trained, stay on it.
    """
    movable = ("text_encoder", "vae", *((TRANSFORMER,) if choice.lora is not None else ()))
    return tuple(part for part in saved.parts if part.startswith(movable) and is_network(saved, part))


def load_transformer(model: str, dtype: torch.dtype) -> Any:
    """Load the transformer of a saved pipeline alone."""
    network = getattr(diffusers, require_saved_pipeline(model).parts[TRANSFORMER][1])
    return network.from_pretrained(model, subfolder=TRANSFORMER, torch_dtype=dtype, use_safetensors=True)


def read_initial_state(model: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load the weights of a saved pipeline's transformer."""
    state: dict[str, Tensor] = load_transformer(model, dtype).state_dict()
    return state
