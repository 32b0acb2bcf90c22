"""Builds the tiny text model from transformers' Llama classes."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.tiny_text.recipe import TinyTextRecipe


def build_model(recipe: TinyTextRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with fresh weights drawn from the recipe's seed; global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        max_position_embeddings=recipe.context,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(config).eval()
