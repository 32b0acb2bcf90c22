"""The numbers of a model that its memory depends on, counted on networks built without memory."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from grpo_core.policies.estimate import count_parameters
from grpo_core.policies.glm_image.architecture import build_on_meta
from grpo_core.policies.glm_image.component_configs import ComponentConfigs
from grpo_core.policies.glm_image.policy import FROZEN_PARTS


@dataclass(frozen=True)
class ComponentSizes:
    """Parameter counts and widths.

    Attributes:
        autoregressive: parameters of the token model, vision tower and quantizer included.
        language_model: parameters of it that are trained when there is no adapter.
        decoder: parameters of the diffusion transformer.
        vae: parameters of the autoencoder.
        text_encoder: parameters of the glyph encoder.
        text_encoder_fp32: those of them that transformers keeps in fp32 when the rest is fp16.
        adapter: parameters of the adapters; 0 without.
        adapter_rank: r; 0 without.
        adapted: names of the linear layers, within one layer of the token model, that have an adapter.
        layers: of the token model; so are the next six.
        hidden: width of the residual stream.
        intermediate: width of the gated MLP.
        heads: of queries.
        key_value_heads: of keys and values.
        head_dim: of one head.
        vocabulary: columns of the output head.
        support: ids that can be sampled.
        unit: pixels along one side of a large token.
        decoder_hidden: width of the diffusion transformer.
        vae_widths: channels of the autoencoder's blocks, full resolution first.
    """

    autoregressive: int
    language_model: int
    decoder: int
    vae: int
    text_encoder: int
    text_encoder_fp32: int
    adapter: int
    adapter_rank: int
    adapted: frozenset[str]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    support: int
    unit: int
    decoder_hidden: int
    vae_widths: tuple[int, ...]


def component_sizes(
    configs: ComponentConfigs, *, lora_rank: int | None = None, lora_targets: str | None = None
) -> ComponentSizes:
    """Count a model's parameters and those of its adapters.

    An adapter of rank r on a linear layer of shape [out, in] has r * (in + out) parameters (Hu et al., 2021,
    arXiv:2106.09685, section 4.1).

    Args:
        configs: from `read_configs`, `find_configs` or `released_configs`.
        lora_rank: None trains every weight of the language model.
        lora_targets: regular expression over full layer names, as peft matches it; needed with a rank.
    """
    parts = build_on_meta(configs)
    text = configs.autoregressive.text_config
    adapted = _matching_linears(parts.autoregressive, lora_targets) if lora_rank and lora_targets else {}
    kept = tuple(getattr(parts.text_encoder, "_keep_in_fp32_modules", None) or ())
    trained = (p.numel() for n, p in parts.autoregressive.named_parameters() if not n.startswith(FROZEN_PARTS))
    # Read off the networks: a configuration leaves out what is at its default.
    vae: Any = parts.vae.config
    decoder: Any = parts.decoder.config
    widths = tuple(vae.block_out_channels)
    return ComponentSizes(
        autoregressive=count_parameters(parts.autoregressive),
        language_model=sum(trained),
        decoder=count_parameters(parts.decoder),
        vae=count_parameters(parts.vae),
        text_encoder=count_parameters(parts.text_encoder),
        text_encoder_fp32=sum(
            p.numel() for n, p in parts.text_encoder.named_parameters() if any(k in n.split(".") for k in kept)
        ),
        adapter=sum((lora_rank or 0) * (m.in_features + m.out_features) for m in adapted.values()),
        adapter_rank=lora_rank or 0,
        adapted=frozenset(name.rpartition(".")[2] for name in adapted),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=text.num_attention_heads,
        key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocabulary=text.vision_vocab_size,
        support=configs.autoregressive.vq_config.num_embeddings,
        unit=2 * decoder.patch_size * 2 ** (len(widths) - 1),
        decoder_hidden=decoder.num_attention_heads * decoder.attention_head_dim,
        vae_widths=widths,
    )


def _matching_linears(model: nn.Module, targets: str) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.fullmatch(targets, name)
    }
