"""Prompts become the ids that transformers makes of them, padded on the left."""

import json

import pytest
import torch

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.prompts import encode_prompts, prompt_ids, read_messages
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from tests.grpo_core.policies.causal_lm.made_models import make_tokenizer
from tests.tiny_text_policy import PROMPTS

CPU = torch.device("cpu")
PLAIN = CausalLMSettings(chat_template=False)


def stored(*messages: tuple[str, str]) -> str:
    return json.dumps([{"role": role, "content": content} for role, content in messages])


def test_rows_are_what_the_tokenizer_pads_by_itself() -> None:
    tokenizer = make_tokenizer()
    encoded = encode_prompts(tokenizer, PLAIN, PROMPTS, context=None, device=CPU)
    padded = tokenizer(list(PROMPTS), padding=True, return_tensors="pt")
    assert torch.equal(encoded.attention_mask, padded["attention_mask"])
    assert torch.equal(encoded.input_ids * encoded.attention_mask, padded["input_ids"] * padded["attention_mask"])
    for row, length in enumerate(encoded.lengths.tolist()):
        assert encoded.position_ids[row, -length:].tolist() == list(range(length))


def test_a_plain_prompt_is_a_users_message() -> None:
    tokenizer = make_tokenizer()
    ids = prompt_ids(tokenizer, CausalLMSettings(), "ok")
    assert tokenizer.decode(ids) == "<|user|>ok<|end|><|assistant|>"
    assert ids == tokenizer.apply_chat_template(
        [{"role": "user", "content": "ok"}], add_generation_prompt=True, return_dict=False
    )
    assert ids == prompt_ids(tokenizer, CausalLMSettings(), stored(("user", "ok")))


def test_a_system_prompt_goes_before_prompts_that_bring_none() -> None:
    tokenizer, settings = make_tokenizer(), CausalLMSettings(system_prompt="be short")
    assert tokenizer.decode(prompt_ids(tokenizer, settings, "ok")) == (
        "<|system|>be short<|end|><|user|>ok<|end|><|assistant|>"
    )
    own = stored(("system", "be long"), ("user", "ok"))
    assert tokenizer.decode(prompt_ids(tokenizer, settings, own)) == (
        "<|system|>be long<|end|><|user|>ok<|end|><|assistant|>"
    )


def test_a_conversation_that_the_assistant_began_to_answer_is_gone_on_with() -> None:
    tokenizer = make_tokenizer()
    begun = stored(("user", "ok"), ("assistant", "yes, b"))
    assert tokenizer.decode(prompt_ids(tokenizer, CausalLMSettings(), begun)) == (
        "<|user|>ok<|end|><|assistant|>yes, b"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3] sorted?",
        "[1, 2, 3]",
        "[]",
        '[{"role": "user"}]',
        '[{"role": "user", "content": "a", "name": "b"}]',
        '[{"role": "user", "content": ["a"]}]',
        '{"role": "user", "content": "a"}',
        '["role", "content"]',
    ],
)
def test_other_json_is_plain_text(text: str) -> None:
    assert read_messages(text) is None
    tokenizer = make_tokenizer()
    assert text in tokenizer.decode(prompt_ids(tokenizer, CausalLMSettings(), text))


@pytest.mark.parametrize(
    ("settings", "prompt", "place"),
    [
        (CausalLMSettings(chat_template=True), "ok", "rollout.chat_template"),
        (CausalLMSettings(system_prompt="be short"), "ok", "rollout.system_prompt"),
        (CausalLMSettings(), stored(("user", "ok")), "prompt"),
        (CausalLMSettings(), "", "prompt"),
    ],
)
def test_without_a_template_what_needs_one_is_refused(settings: CausalLMSettings, prompt: str, place: str) -> None:
    with pytest.raises(InputError) as refused:
        prompt_ids(make_tokenizer(template=False), settings, prompt)
    assert refused.value.place == place


def test_a_template_that_prints_the_date_prints_the_same_one_every_day() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{%- set today = strftime_now('%d %b %Y') -%}"
        "{{ strftime_now('%Y-%m-%d') }}, {{ today }}: {{ messages[0].content }}"
    )
    assert tokenizer.decode(prompt_ids(tokenizer, CausalLMSettings(), "ok")) == "2025-01-01, 01 Jan 2025: ok"


def test_what_a_template_refuses_is_named() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="roles must alternate"):
        prompt_ids(tokenizer, CausalLMSettings(), "ok")


def test_the_longest_prompt_that_fits_passes_and_one_id_more_does_not() -> None:
    tokenizer, settings = make_tokenizer(), CausalLMSettings(chat_template=False, max_completion_length=10)
    encode_prompts(tokenizer, settings, ["b" * 54], context=64, device=CPU)
    with pytest.raises(InputError, match=r"55 ids, and at most 54 .* 10 in the model's 64"):
        encode_prompts(tokenizer, settings, ["ok", "b" * 55], context=64, device=CPU)
