"""A tokenizer with one id for each word that the captions use, and bytes for any other text."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.codebook import CODEBOOK_SIZE
from data.shapes import all_scenes

IMAGE_START_ID = CODEBOOK_SIZE
IMAGE_END_ID = CODEBOOK_SIZE + 1
# As in the released model, the output head is wider than codes, start and end together, and text ids begin after it.
VISION_VOCAB_SIZE = 8 * (CODEBOOK_SIZE // 8 + 1) + 8

_PAD, _GRID_BOS, _GRID_EOS, _IMAGE = "<|endoftext|>", "<sop>", "<eop>", "<|image|>"


def image_token(index: int) -> str:
    """The text form of a vision id (a code, the image start or the image end)."""
    return f"<|dit_token_{index}|>"


def _known_words() -> list[str]:
    words = {word for scene in all_scenes() for word in scene.caption.split()}
    words |= {str(number) for number in range(10)}
    # Byte-level pre-tokenisation writes the space before a word as this letter, part of the word.
    return sorted(words | {"\u0120" + word for word in words})


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer of the tiny autoregressive model.

    A word of the captions is one id, with or without the space before it; every other word is its UTF-8 bytes, so any
    text has ids and none is unknown. Pads are on the left.
    """
    entries = [image_token(i) for i in range(VISION_VOCAB_SIZE)] + sorted(pre_tokenizers.ByteLevel.alphabet())
    entries += [word for word in _known_words() if len(word) > 1]
    specials = [_PAD, _GRID_BOS, _GRID_EOS, _IMAGE]
    vocabulary = {entry: index for index, entry in enumerate(entries + specials)}
    # ignore_merges: a word that is an entry is taken whole, without the merges that would build it from bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    start, end = image_token(IMAGE_START_ID), image_token(IMAGE_END_ID)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in [*specials, start, end]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=start,
        eos_token=end,
        pad_token=_PAD,
        padding_side="left",
        extra_special_tokens={"image_token": _IMAGE, "grid_bos_token": _GRID_BOS, "grid_eos_token": _GRID_EOS},
    )
