"""A tokenizer with one id for each word of the instruction, and bytes for any other text."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.tiny_text.letters import INSTRUCTION

_SYSTEM, _USER, _ASSISTANT, _END, _PAD = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' + message.content + '" + _END + "' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '" + _ASSISTANT + "' }}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer, with its chat template.

    A word of the instruction is one id, with or without the space before it; every other word is its UTF-8 bytes, so
    the letters of the word that is asked about are one id each, any text has ids, and none is unknown.
    """
    words = set(INSTRUCTION.split())
    # Byte-level pre-tokenisation writes the space before a word as this letter, part of the word.
    words |= {"\u0120" + word for word in words}
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *sorted(words)]
    specials = [_PAD, _SYSTEM, _USER, _ASSISTANT, _END]
    vocabulary = {entry: index for index, entry in enumerate(entries + specials)}
    # ignore_merges: a word that is an entry is taken whole, without the merges that would build it from bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_PAD, padding_side="left")
    built.chat_template = _CHAT_TEMPLATE
    return built
