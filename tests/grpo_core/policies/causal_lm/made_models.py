"""Small language models of several architectures, made in code, with logits that depend on what is read."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from data.tiny_text import build_tokenizer

# Wider than the tokenizer, as heads padded to a round number are.
HEAD_ROWS = 288
_WIDTHS = {
    "vocab_size": HEAD_ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 268,
}
_ABSOLUTE = {"vocab_size": HEAD_ROWS, "bos_token_id": None, "eos_token_id": 268, "initializer_range": 0.3}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_WIDTHS),
    "qwen2": Qwen2Config(**_WIDTHS, tie_word_embeddings=True),
    "gpt2": GPT2Config(**_ABSOLUTE, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    # A window shorter than prompt and completion, and a cap that its logits reach.
    "gemma2": Gemma2Config(**_WIDTHS, head_dim=8, sliding_window=6, final_logit_softcapping=5.0),
    "granite": GraniteConfig(**_WIDTHS, logits_scaling=4.0),
    "cohere": CohereConfig(**_WIDTHS, logit_scale=0.25),
    "bloom": BloomConfig(**_ABSOLUTE, hidden_size=32, n_layer=2, n_head=4),
}
AFTER_HEAD = {"gemma2", "granite", "cohere"}


def make_model(kind: str) -> Any:
    """A model with seeded weights, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


def make_tokenizer(*, pad: bool = True, template: bool = True) -> PreTrainedTokenizerFast:
    """The tiny text model's, with or without a pad token and a chat template."""
    tokenizer = build_tokenizer()
    if not pad:
        tokenizer.pad_token = None
    if not template:
        tokenizer.chat_template = None
    return tokenizer


def change_inputs(model: Any, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the model's body is given from now on."""

    def before(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        change(named)
        return arguments, named

    model.base_model.register_forward_pre_hook(before, with_kwargs=True)
