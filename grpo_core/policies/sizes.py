"""What decides a model's memory, as its family counts it on the meta device, where shapes and names take no memory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from grpo_core.policies.trained.model import TrainedModel
from grpo_core.streams import ImageSize, Stream

_ATTENTION = re.compile(r"(.+?\.\d+)\.\w*att\w*\.")


@dataclass(frozen=True)
class ComponentSizes:
    """The sizes of a component that is trained; positions are those of the longest row.

    Attributes:
        trained: the model with its trained part.
        width: hidden width of a position.
        blocks: number of transformer blocks.
        positions: of a row: ids, or patches of the image and ids of the prompt.
        steps: passes over a row that one backward pass goes through: noisy steps; 1 for tokens.
        passes: of the model for each of them; 2 with classifier-free guidance.
        scored: tokens of a row that are scored; 0 for denoising.
        vocabulary: ids that they can be.
        whole_logits: all logits are computed at once, because another operation follows the output head.
        encoder_values: hidden values of a row in all blocks of an encoder that is trained too; 0 without one.
    """

    trained: TrainedModel
    width: int
    blocks: int
    positions: int
    steps: int = 1
    passes: int = 1
    scored: int = 0
    vocabulary: int = 0
    whole_logits: bool = False
    encoder_values: int = 0


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model; those that depend on an image are of the size that needs most.

    Attributes:
        networks: parameters of each network by the name of its part, adapters left out.
        components: the trained ones.
        described: the model in a few words, with its number of parameters.
        cached: values in the key-value cache of a sampled row; 0 without tokens.
        head: width of the output head; 0 without tokens.
        image_values: hidden values of an image, over all passes that run at once; 0 for texts.
        image_pixels: pixels of an image.
        image_channels: of the autoencoder at full resolution, in the block before its last.
        state_values: numbers in the latents of one image; None where the configuration does not say it.
        kept_bytes: bytes of what is kept beside the weights, by the name of its part.
        tokens: number of tokens of an image by its size; empty for texts.
        quantized: of networks in 4 bits: their quantized parameters, and the bytes of these with scales.
        needed: the phases of an estimate that need a network, of those that can be offloaded.
    """

    networks: Mapping[str, int]
    components: Mapping[Stream, ComponentSizes]
    described: str
    cached: int = 0
    head: int = 0
    image_values: int = 0
    image_pixels: int = 0
    image_channels: int = 0
    state_values: int | None = None
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[ImageSize, int] = field(default_factory=dict)
    quantized: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    needed: Mapping[str, frozenset[Any]] = field(default_factory=dict)


def count_parameters(module: nn.Module) -> int:
    """Count the elements of all parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def shown_count(parameters: int) -> str:
    """Write a number of parameters in thousands of millions, `7.62 B`, and below one of those in millions, `0.33 M`."""
    # Rounded to three digits, this is the first that is 1 B.
    return f"{parameters / 1e9:.3g} B" if parameters >= 0.9995e9 else f"{parameters / 1e6:.3g} M"


def count_blocks(transformer: nn.Module) -> int:
    """Count the blocks of a denoising model: the modules of a list that have attention."""
    found = (_ATTENTION.match(f"{name}.") for name, _ in transformer.named_modules())
    return len({match[1] for match in found if match is not None})


def hidden_width(config: Mapping[str, Any]) -> int:
    """Return the width of a denoising model's positions, by the names that models of diffusers give it."""
    for name in ("hidden_size", "dim"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def cached_values(config: Any) -> int:
    """Return how many values the key-value cache of a transformers model has for one id."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim)
