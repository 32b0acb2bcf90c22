"""The tiny text model: its tokenizer, a Llama with random weights, and the folder that transformers loads."""

from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.tiny_text.letters import INSTRUCTION
from data.tiny_text.recipe import TinyTextRecipe

_SYSTEM, _USER, _ASSISTANT, _END, _PAD = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' + message.content + '" + _END + "' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '" + _ASSISTANT + "' }}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer, with its chat template.

    A word of the instruction is one id, with or without the space before it; every other word is its UTF-8 bytes, so
    the letters of the word to sort are one id each, any text has ids, and none is unknown.
    """
    words = set(INSTRUCTION.split())
    # Byte-level pre-tokenisation writes the space before a word as this letter, part of the word.
    words |= {"\u0120" + word for word in words}
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *sorted(words)]
    specials = [_PAD, _SYSTEM, _USER, _ASSISTANT, _END]
    vocabulary = {entry: index for index, entry in enumerate(entries + specials)}
    # ignore_merges: a word that is an entry is one id, without the merges that would build it from bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_PAD, padding_side="left")
    built.chat_template = _CHAT_TEMPLATE
    return built


def build_model(recipe: TinyTextRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a Llama with random weights from the recipe's seed; global random state does not change."""
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


LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
"""Libraries whose versions affect the result."""


def save_tiny_text_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save model and tokenizer; `AutoModelForCausalLM.from_pretrained(folder)` loads it without this project."""
    # Its progress bars would break ours.
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
