"""What people see of prompts that nobody has checked, and of addresses with a secret in them."""

import json
from collections.abc import Mapping

import pytest

from grpo_core.errors import InputError, hide_secrets, refuse_secrets
from grpo_core.rollouts.messages import answer_begun, read_messages, shown_prompt, shown_question

ROLE = '"role": "user"'
AS_TEXT = (
    f'[{{{ROLE}, "content": "a"}}, 5]',
    f'[{{{ROLE}, "content": "a"}}, null, "b"]',
    f'[{{{ROLE}, "content": "a"}}, ["b"]]',
    f"[{{{ROLE}}}, {'1' * 5000}]",
    f'[{{{ROLE}, "content": {"[" * 100_000}{"]" * 100_000}}}]',
    "[" * 100_000,
    "[",
    "[]",
)
"""Shown as they are."""
AS_MESSAGES: Mapping[str, tuple[str, str, str]] = {
    "a number": (f'[{{{ROLE}, "content": 1}}]', "user: 1", "1"),
    "nothing": (f"[{{{ROLE}}}]", "user: null", "null"),
    "an object": (f'[{{{ROLE}, "content": {{"a": [1]}}}}]', 'user: {"a": [1]}', '{"a": [1]}'),
    "blocks": (
        f'[{{{ROLE}, "content": [{{"type": "text", "text": 1}}, 5, {{"type": "text", "text": "a"}}, {{"type": 7}}]}}]',
        "user: a<image>",
        "a<image>",
    ),
    "a role": ('[{"role": ["user"], "content": "a"}]', '["user"]: a', "a"),
    "no role": (f'[{{{ROLE}, "content": "a"}}, {{"content": 2}}]', "user: a\nnull: 2", "a"),
    "half a letter": (f'[{{{ROLE}, "content": "\\ud83d"}}]', "user: \\ud83d", "\\ud83d"),
}


@pytest.mark.parametrize("index", range(len(AS_TEXT)))
def test_what_is_no_conversation_is_shown_as_it_is(index: int) -> None:
    prompt = AS_TEXT[index]
    assert shown_prompt(prompt) == shown_question(prompt) == prompt
    assert answer_begun(prompt) == ""


@pytest.mark.parametrize("case", AS_MESSAGES)
def test_a_conversation_with_strange_messages_is_shown(case: str) -> None:
    prompt, shown, question = AS_MESSAGES[case]
    assert (shown_prompt(prompt), shown_question(prompt)) == (shown, question)
    assert answer_begun(prompt) == ""
    begun = json.dumps([*(read_messages(prompt) or ()), {"role": "assistant", "content": {"a": 1}}])
    assert answer_begun(begun) == '{"a": 1}'


def test_every_depth_is_shown() -> None:
    """Reading and writing JSON end at other depths."""
    for depth in range(800, 1100):
        prompt = f'[{{{ROLE}, "content": {{"a": {"[" * depth}{"]" * depth}}}}}]'
        assert shown_prompt(prompt).startswith(("user: ", "[{"))
        assert isinstance(shown_question(prompt), str)


SHOWN = {
    "http://me:HIDDEN@host/p.jsonl": "http://***@host/p.jsonl",
    "https://me:HID/DEN@host:8443/p": "https://***@host:8443/p",
    "https://hf_HIDDEN@huggingface.co/x": "https://***@huggingface.co/x",
    "sftp://me:HIDDEN@host/p": "sftp://***@host/p",
    "simplecache::s3://KEY:HIDDEN@bucket/p": "simplecache::s3://***@bucket/p",
    "https://b.s3.amazonaws.com/p?X-Amz-Expires=9&X-Amz-Signature=HIDDEN": (
        "https://b.s3.amazonaws.com/p?X-Amz-Expires=9&X-Amz-Signature=***"
    ),
    "https://host/p?sig=HIDDEN&version=2#top": "https://host/p?sig=***&version=2#top",
    "https://host/p?access_token=HIDDEN": "https://host/p?access_token=***",
}
PLAIN = (
    "data/prompts.jsonl",
    "mail@host",
    "http://host:8600",
    "http://[::1]:8600/v1",
    "https://host/a@b:c",
    "https://host:443/a@b?page=2&tokens=5",
    "sftp://me@host/p",
    "abfs://container@account.dfs.core.windows.net/p",
    "hf://datasets/owner/name@main/p.parquet",
    "Rate the image. Is http://host/page: a@b in it?",
)


@pytest.mark.parametrize(("address", "shown"), SHOWN.items())
def test_secrets_are_refused_and_not_repeated(address: str, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        refuse_secrets("data.prompts", address)
    assert (caught.value.place, caught.value.value) == ("data.prompts", shown)
    assert "HIDDEN" not in str(caught.value)


@pytest.mark.parametrize("address", PLAIN)
def test_other_addresses_and_texts_stay(address: str) -> None:
    assert hide_secrets(address) == address
    refuse_secrets("data.prompts", address)
