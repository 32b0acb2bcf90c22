"""Text models small enough to be made for each test."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def tiny_llama(*, tied: bool = False, seed: int = 0) -> Any:
    """In evaluation mode."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES, intermediate_size=24, num_key_value_heads=1, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).eval()


def tiny_opt(dropout: float) -> Any:
    """A model whose layers have a dropout of their own."""
    torch.manual_seed(0)
    config = OPTConfig(**SIZES, ffn_dim=24, dropout=dropout, word_embed_proj_dim=16, tie_word_embeddings=False)
    return OPTForCausalLM(config).eval()


def logprobs(model: nn.Module) -> Tensor:
    """Of every next id, [2, 6, 37], over fixed ids."""
    ids = torch.arange(12).reshape(2, 6)
    found: Tensor = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    return found


def values_of(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """A copy of each."""
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


@torch.no_grad()
def disturb(parameters: dict[str, nn.Parameter], scale: float = 0.1, seed: int = 5) -> None:
    """Add seeded noise to each."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether both hold the same names and the same bits."""
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())
