"""Any text has ids, the letters asked about are one id each, and the template prints conversations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.tiny_text import build_tokenizer
from tests.tiny_text_policy import MODEL

TOKENIZER = build_tokenizer()


@given(st.text(max_size=40).filter(lambda text: "<|" not in text))
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("sort the letters of goga", ["sort", "Ġthe", "Ġletters", "Ġof", "Ġ", "g", "o", "g", "a"]),
        ("aggo", ["a", "g", "g", "o"]),
        ("<|user|>a<|end|>", ["<|user|>", "a", "<|end|>"]),
    ],
)
def test_tokens(text: str, tokens: list[str]) -> None:
    assert TOKENIZER.tokenize(text) == tokens


def test_the_template_prints_every_role() -> None:
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    assert TOKENIZER.apply_chat_template(messages, tokenize=False) == (
        "<|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|>"
    )


def test_the_shipped_tokenizer_is_the_one_that_is_built() -> None:
    shipped: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(MODEL)
    assert shipped.get_vocab() == TOKENIZER.get_vocab()
    assert shipped.chat_template == TOKENIZER.chat_template
    assert (shipped.eos_token, shipped.pad_token, shipped.padding_side) == ("<|end|>", "<|pad|>", "left")
