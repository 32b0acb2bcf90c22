"""A small copy of a saved pipeline with random weights, built from its configuration files alone.

All widths are divided by one power of two, so that sums and multiples of widths, such as the joined embeddings of two
text encoders, stay what they are to one another. Tokenizers and the scheduler are those of the pipeline.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from grpo_core.policies.denoising.settings import SCHEDULER
from grpo_core.policies.diffusers.loading import absent_parts
from grpo_core.policies.diffusers.saved_pipeline import SavedPipeline
from grpo_core.policies.pipeline_files import INDEX_FILE, read_pipeline_file
from grpo_core.policies.pipeline_loading import is_network
from grpo_core.policies.sizes import count_parameters

MAX_PARAMETERS = 60_000_000
"""More would take seconds to fill."""

_DIVISORS = (64, 32, 16, 8, 4, 2, 1)
_NARROWEST = 8
_ROWS = 64
"""Of embeddings: ids are taken modulo their number."""

_BLOCKS = 2
_TEXT_LAYERS = 4

_HEADS = re.compile(r"(\w+_)?heads")
_HEAD_WIDTH = re.compile(r"(\w+_)?head_dim|d_kv|axes_dims?(_rope)?|rope_axes_dims?|mrope_section")
_WIDTH = re.compile(r"(\w+_)?(dim|width|size|channels|d_model|d_ff)")
_NO_WIDTH = re.compile(
    r"(in|out|latent|num)_channels|(\w+_)?(patch|image|sample|kernel|window|chunk|merge|vocab|max|buckets)_size\w*"
)
_OWN_WIDTH = re.compile(r"(\w+_)?(intermediate_size|hidden_dim|d_ff|ffn_dim|ffn_hidden_size)")
"""Of a layer's own values, which have to fit nothing else."""

_LAYERS = re.compile(r"(\w+_)?layers|depth")
_LIBRARIES = {"diffusers": diffusers, "transformers": transformers}


def small_copy(folder: Path, saved: SavedPipeline, run: Callable[[Any], object]) -> Any | None:
    """Build the copy in fp32 on the CPU, its networks frozen and in evaluation mode.

    Args:
        folder: of the pipeline; no weights are read.
        saved: what its configuration files say.
        run: called with each copy that can be built; fails where its parts do not fit one another.

    Returns:
        None if there is no small copy of this pipeline that can be built and run.

    Raises:
        AttributeError: the pipeline asks its scheduler for what it does not have.
    """
    for text_layers in (_layers_read(saved), None):
        for divisor in _DIVISORS:
            try:
                described = _described(folder, saved, divisor, text_layers)
                with torch.device("meta"):
                    if sum(count_parameters(_built(found, config)) for _, found, config in described) > MAX_PARAMETERS:
                        # Wider ones have more.
                        break
                pipeline = _assembled(folder, saved, {part: _filled(_built(*each)) for part, *each in described})
                run(pipeline)
            except Exception as error:
                if isinstance(error, AttributeError) and SCHEDULER in str(error):
                    raise
                # Whatever configurations of other widths trip over.
                continue
            return pipeline
    return None


def _layers_read(saved: SavedPipeline) -> int:
    """Return how many layers of a text encoder a copy needs: some pipelines read outputs of deep ones."""
    call = inspect.signature(getattr(diffusers, saved.class_name).__call__).parameters
    read: Sequence[int] = call["text_encoder_out_layers"].default if "text_encoder_out_layers" in call else ()
    return max(_TEXT_LAYERS, *(layer + 1 for layer in read), 0)


def _assembled(folder: Path, saved: SavedPipeline, networks: Mapping[str, nn.Module]) -> Any:
    """Return a pipeline of these networks and its own other parts.

    `from_pretrained` would read the weights of a network that the pipeline can do without, whatever it is given.
    """
    found = getattr(diffusers, saved.class_name)
    index = read_pipeline_file(str(folder), folder / INDEX_FILE)
    given = {name: index[name] for name in index if not name.startswith("_") and not isinstance(index[name], list)}
    wanted = inspect.signature(found.__init__).parameters
    others = {
        part: getattr(_LIBRARIES[library], name).from_pretrained(folder / part, local_files_only=True)
        for part, (library, name) in saved.parts.items()
        if part not in networks
    }
    parts = {**absent_parts(str(folder), saved), **given, **others, **networks}
    return found(**{name: value for name, value in parts.items() if name in wanted})


class _UnfitError(ValueError):
    """A width that this number does not divide."""


def _described(folder: Path, saved: SavedPipeline, divisor: int, text_layers: int | None) -> list[tuple[str, Any, Any]]:
    """Return name, class and small configuration of each network of the pipeline.

    Raises:
        _UnfitError: this number does not divide all widths.
    """
    made = []
    for part, (library, name) in saved.parts.items():
        if not is_network(saved.parts, part):
            continue
        found: Any = getattr(_LIBRARIES[library], name)
        if library == "transformers":
            config = found.config_class.from_pretrained(folder / part)
            small = _small(config.to_dict(), divisor, text_layers)
            made.append((part, found, type(config).from_dict(small)))
        else:
            config = found.load_config(folder / part)
            small = _small(config, divisor, _BLOCKS) if part != "vae" else _small_autoencoder(config)
            made.append((part, found, small))
    return made


def _built(found: Any, config: Any) -> Any:
    if isinstance(config, dict):
        return found.from_config(config)
    network = found(config).float()
    for module in network.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == _ROWS:
            module.register_forward_pre_hook(lambda embedding, given: (given[0] % embedding.num_embeddings,))
    return network


@torch.no_grad()
def _filled(network: nn.Module) -> nn.Module:
    """Fill every matrix: many layers start at zero, and some are not filled before weights are loaded."""
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        elif not torch.isfinite(parameter).all():
            parameter.zero_()
    return network.requires_grad_(False).eval()


def _small(values: Mapping[str, Any], divisor: int, layers: int | None, rest: int | None = None) -> dict[str, Any]:
    """Return a configuration with narrower and fewer layers.

    Args:
        divisor: of widths.
        layers: at most; None leaves them all.
        rest: what the width of a head is divided by, where this is a part of a configuration with heads.

    Raises:
        _UnfitError: a width or head that cannot be divided.
    """
    # Cross-attention may have heads of its own.
    rests = {kind: _rest(values, divisor, kind, rest) for kind in (True, False)}
    small: dict[str, Any] = {}
    for name, value in values.items():
        crosses = "cross" in name
        if isinstance(value, dict) and (name.endswith("_config") or name.startswith("rope_")):
            small[name] = _small(value, divisor, layers, rests[False])
        elif _HEADS.fullmatch(name) and _is_number(value):
            small[name] = _divided(value, divisor // rests[crosses])
        elif _HEAD_WIDTH.fullmatch(name):
            small[name] = _head_width(name, value, rests[crosses])
        elif _OWN_WIDTH.fullmatch(name) and _is_number(value):
            small[name] = max(min(value, _NARROWEST), value // divisor)
        elif _WIDTH.fullmatch(name) and not _NO_WIDTH.fullmatch(name) and _is_number(value):
            small[name] = _divided(value, divisor, _NARROWEST)
        else:
            small[name] = _other(name, value, values, layers)
    return small


def _rest(values: Mapping[str, Any], divisor: int, crosses: bool, inherited: int | None) -> int:
    """Return what is left of the divisor for the width of a head when the number of heads was divided as far as it can.

    With several numbers of heads, as in grouped-query attention, all are divided by the same.
    """
    heads = [value for name, value in values.items() if _HEADS.fullmatch(name) and _is_number(value)]
    own = [values[name] for name in values if _HEADS.fullmatch(name) and ("cross" in name) == crosses]
    counts = [value for value in own if _is_number(value)] or heads
    if not counts:
        return divisor if inherited is None else inherited
    return divisor // math.gcd(divisor, *counts)


def _head_width(name: str, value: Any, rest: int) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        # Rotary positions turn pairs of values; sections are of pairs.
        least = 1 if name == "mrope_section" else 2
        return [_divided(each, rest, least, least) for each in value]
    return _divided(value, rest, 2, 2) if _is_number(value) else value


def _divided(value: int, divisor: int, least: int = 1, unit: int = 1) -> int:
    small, left = divmod(value, divisor)
    if left or (small < least and small < value) or (small % unit and divisor > 1):
        raise _UnfitError
    return small


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _other(name: str, value: Any, values: Mapping[str, Any], layers: int | None) -> Any:
    """Return a value that is no width: numbers of layers and of ids are bounded."""
    if name == "vocab_size":
        return _ROWS
    if name == "pad_token_id" and _is_number(value):
        return min(value, _ROWS - 1)
    if layers is None:
        return value
    if _LAYERS.fullmatch(name) and _is_number(value):
        return min(value, layers)
    if name == "layer_types" and isinstance(value, list):
        return value[:layers]
    return value


def _small_autoencoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an autoencoder with as many levels and fewer channels, which nothing else knows."""
    names = [name for name in config if name.endswith("block_out_channels") and config[name]]
    channels = [each for name in names for each in config[name]] + [config[name] for name in _BASES if config.get(name)]
    common = math.gcd(16, *channels)
    divisor = next(each for each in (16, 8, 4, 2, 1) if common % each == 0 and (min(channels) >= 4 * each or each == 1))
    small = dict(config)
    for name in names:
        small[name] = [each // divisor for each in config[name]]
    for name in (*_BASES, "attention_head_dim"):
        if _is_number(config.get(name)):
            small[name] = max(1, config[name] // divisor)
    if _is_number(config.get("norm_num_groups")):
        small["norm_num_groups"] = math.gcd(config["norm_num_groups"], *(each // divisor for each in channels))
    for name in ("layers_per_block", "num_res_blocks"):
        if _is_number(config.get(name)):
            small[name] = 1
    return small


_BASES = ("base_dim", "decoder_base_dim")
"""Channels of autoencoders that multiply them level by level."""
