"""Tokenizers, text encoders and autoencoders of tiny pipelines."""

import string
from typing import Any

import transformers
from tokenizers import pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tests.grpo_core.policies.denoising.tiny_pipelines import autoencoder

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
QWEN: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
}
T5: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def clip_tokenizer(length: int = 16) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    return transformers.CLIPTokenizer(
        vocab={word: place for place, word in enumerate(words)}, merges=[], model_max_length=length
    )


def t5_tokenizer() -> Any:
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *string.ascii_lowercase]
    return transformers.T5Tokenizer(
        vocab=[(piece, -float(place > 2)) for place, piece in enumerate(pieces)], extra_ids=0
    )


def qwen_tokenizer() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: place for place, word in enumerate([*letters, *SPECIAL])}
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def clip_encoder(width: int, length: int = 16) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=600,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=length,
        projection_dim=width,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return transformers.CLIPTextModelWithProjection(config)


def t5_encoder(width: int) -> Any:
    return transformers.T5EncoderModel(transformers.T5Config(**{**T5, "d_model": width}, is_encoder_decoder=False))


def qwen3(**changes: Any) -> Any:
    return transformers.Qwen3Model(transformers.Qwen3Config(**{**QWEN, **changes}))


def started_tokenizer() -> Any:
    """A tokenizer that begins each text with a token of its own, so that an empty prompt has one."""
    tokenizer = qwen_tokenizer()
    start = (SPECIAL[1], tokenizer.convert_tokens_to_ids(SPECIAL[1]))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{SPECIAL[1]} $A", special_tokens=[start])
    return tokenizer


def listed_template(tokenizer: Any) -> Any:
    """Add a template for messages whose content is a list of texts."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content[0].text }}\n{% endfor %}"
    return tokenizer


def add_image_tokens(tokenizer: Any) -> dict[str, int]:
    """Add the tokens that stand for images; return their ids by the names that configurations have for them."""
    ids = {}
    for name in ("image_pad", "video_pad", "vision_start", "vision_end"):
        tokenizer.add_tokens([f"<|{name}|>"], special_tokens=True)
        ids[f"{name.removesuffix('_pad')}_token_id"] = tokenizer.convert_tokens_to_ids(f"<|{name}|>")
    return ids


def eightfold_autoencoder() -> Any:
    """An autoencoder of 8 pixels a latent, which some pipelines count on."""
    return autoencoder(
        block_out_channels=(4,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
