"""What decides a model's memory, as its family counts it on the meta device, where shapes and names take no memory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from grpo_core.policies.trained.model import TrainedModel
from grpo_core.rollouts.streams import ImageSize, Stream

Phase = Literal["encoding", "sampling", "decoding", "tokens update", "denoising update"]

_ATTENTION = re.compile(r"(.+?\.\d+)\.\w*att\w*\.")


@dataclass(frozen=True)
class ComponentSizes:
    """The sizes of a component that is trained.

    Attributes:
        width: hidden width of a position.
        positions: of the longest row: ids, or patches of the image and ids of the prompt.
        passes: over a row, for one denoising step or for all tokens; two with classifier-free guidance.
        steps: noisy steps of a row; 1 for tokens.
        scored: tokens of a row that are scored; 0 for denoising; vocabulary: ids that they can be.
        whole_logits: all logits are computed at once, because another operation follows the output head.
        truncated: ids are cut by top-k, top-p or min-p, so that tokens are scored with a support.
        encoder_values: hidden values of a row in all blocks of an encoder that is trained too; 0 without one.
        shared: positions of its prompt, if rows of one prompt can share them; 0 where each row computes its own.
    """

    trained: TrainedModel
    width: int
    blocks: int
    positions: int
    passes: int = 1
    steps: int = 1
    scored: int = 0
    vocabulary: int = 0
    whole_logits: bool = False
    truncated: bool = False
    encoder_values: int = 0
    shared: int = 0


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model; those that depend on an image are of the size that needs most.

    Attributes:
        networks: parameters of each network by the name of its part, adapters left out.
        prompt: ids that a prompt is counted as.
        cached: values in the key-value cache of a sampled row; 0 without tokens, like head, the output head's width.
        image_values: hidden values of an image, over all passes that run at once; 0 for texts.
        image_channels: of the autoencoder at full resolution, in the block before its last.
        state_values: numbers in the latents of one image; None where the configuration does not say it.
        tokens: number of tokens of an image by its size; empty for texts.
        quantized: parameters in 4 bits of each network that has some.
        needed: the phases that need a network, of those that can be offloaded.
    """

    networks: Mapping[str, int]
    components: Mapping[Stream, ComponentSizes]
    prompt: int
    cached: int = 0
    head: int = 0
    image_values: int = 0
    image_pixels: int = 0
    image_channels: int = 0
    state_values: int | None = None
    tokens: Mapping[ImageSize, int] = field(default_factory=dict)
    quantized: Mapping[str, int] = field(default_factory=dict)
    needed: Mapping[str, frozenset[Phase]] = field(default_factory=dict)


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


def image_channels(vae: Mapping[str, Any]) -> int:
    """Return the channels of an autoencoder at full resolution, in the block before its last, by its configuration."""
    channels = vae.get("block_out_channels") or vae.get("decoder_block_out_channels") or (256,)
    return int(channels[min(1, len(channels) - 1)])


def cached_values(config: Any) -> int:
    """Return how many values the key-value cache of a transformers model has for one id."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim)


def token_sizes(
    trained: TrainedModel, text: Any, settings: Any, prompt: int, tokens: int, **others: Any
) -> ComponentSizes:
    """Return the sizes of a language model by its configuration, or with `others` in place of its vocabulary and so on.

    The last of the tokens that are sampled at most is never fed back.
    """
    sizes = {"vocabulary": text.vocab_size, "truncated": settings.truncates, **others}
    return ComponentSizes(
        trained, text.hidden_size, text.num_hidden_layers, prompt + tokens - 1, scored=tokens, **sizes
    )
