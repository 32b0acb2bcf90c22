"""Prompts that are conversations: what models, rewards and people get of them.

A prompt is one text everywhere. That of a conversation is the JSON of its messages with every key that they were given,
as :func:`write_messages` writes it, so nothing that a chat template or a reward may look at is lost.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Message = dict[str, Any]
"""`role`, and `content`: a text, or a list of blocks of type text or image; other keys are for chat templates."""

IMAGE_MARK = "<image>"
"""The place of a source image in a plain text."""

_ROLES = ("system", "user", "assistant", "tool")
_LAST_ROLES = _ROLES[1:]


def is_conversation(value: object) -> bool:
    """Return whether a value is a list of messages, as TRL's `is_conversational` has it: by its first entry."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def write_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as the text of a prompt."""
    return json.dumps(list(messages), ensure_ascii=False)


def read_messages(prompt: str) -> list[Message] | None:
    """Return the messages of a prompt that is a conversation; None for a plain text, JSON or not."""
    if not prompt.startswith("["):
        return None
    try:
        found: list[Message] = json.loads(prompt)
    # A number of thousands of digits is JSON, and none of Python's.
    except (ValueError, RecursionError):
        return None
    return found if is_conversation(found) else None


def refuse_messages(messages: Sequence[Any], place: str, *, images: bool) -> None:
    """Raise InputError, with the message and its key, for a conversation that a model cannot read as a prompt."""
    for number, message in enumerate(messages, start=1):
        where = f"{place}, message {number}"
        if not isinstance(message, dict):
            raise InputError(where, message, "A message is an object with role and content.")
        role = message.get("role")
        # A model that sees images gets what TRL prepares, which knows these roles only.
        if not isinstance(role, str) or not role or (images and role not in _ROLES):
            raise InputError(f"{where}, role", role, f"Name who speaks: {', '.join(_ROLES[:-1])} or {_ROLES[-1]}.")
        if message.get("tool_calls"):
            hint = "A rollout is one answer without tools. Leave the call and its result out, or write them as text."
            raise InputError(f"{where}, tool_calls", message["tool_calls"], hint)
        _refuse_content(message.get("content"), f"{where}, content", images=images)
    if (role := messages[-1]["role"]) not in _LAST_ROLES:
        hint = f"A prompt ends with a message of {', '.join(_LAST_ROLES[:-1])} or {_LAST_ROLES[-1]}, as in TRL."
        raise InputError(f"{place}, message {len(messages)}, role", role, hint)


def _refuse_content(content: object, place: str, *, images: bool) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        hint = "Write a text there, or a list of blocks."
        raise InputError(place, content, "A message needs text. Leave the message out." if content is None else hint)
    for number, block in enumerate(content, start=1):
        where, kind = f"{place}, block {number}", block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            if not isinstance(block.get("text"), str):
                raise InputError(f"{where}, text", block.get("text"), "Write a text there, or leave the block out.")
        elif kind not in ("image", "image_url"):
            known = "text or image" if images else "text"
            raise InputError(where, block if kind is None else kind, f"Blocks are of type {known}.")
        elif not images:
            hint = "This model is given texts only. Use policy.kind vision_lm, or name the data.image_column of edits."
            raise InputError(where, kind, hint)


def text_of(content: object, image: str = IMAGE_MARK) -> str:
    """Return a message's content as one text, its blocks joined, with `image` in place of each image."""
    if not isinstance(content, list):
        return _one_text(content)
    texts = [each.get("text") if each.get("type") == "text" else image for each in content if isinstance(each, dict)]
    return "".join(each for each in texts if isinstance(each, str))


def _one_text(value: object) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "..."


def _printable(text: str) -> str:
    """Replace surrogates, which JSON can name and no file can have."""
    return text.encode("utf-8", "backslashreplace").decode()


def caption_of(prompt: str, place: str) -> str:
    """Return the one text that an image generator reads: a plain prompt itself, or the only message of a user."""
    messages = read_messages(prompt)
    if messages is None:
        return prompt
    for number, message in enumerate(messages, start=1):
        said = text_of(message["content"], image="")
        # An empty system message says nothing.
        if number < len(messages) and (message["role"] != "system" or said.strip()):
            hint = "An image generator reads one text: give the user's message alone, or the prompt as text."
            raise InputError(f"{place}, message {number}, role", message["role"], hint)
    if messages[-1]["role"] != "user":
        hint = "An image generator reads the user's text. End with a message of the user."
        raise InputError(f"{place}, message {len(messages)}, role", messages[-1]["role"], hint)
    return text_of(messages[-1]["content"], image="")


def _shown(prompt: str) -> list[Message] | None:
    """Return the messages of a prompt that can be shown as such; a stored one may be a stranger's."""
    messages = read_messages(prompt)
    return messages if messages and all(isinstance(each, dict) for each in messages) else None


def shown_prompt(prompt: str) -> str:
    """Return a prompt for people: a conversation as lines of `role: text`."""
    messages = _shown(prompt)
    if messages is None:
        return prompt
    return _printable("\n".join(f"{_one_text(each.get('role'))}: {text_of(each.get('content'))}" for each in messages))


def shown_question(prompt: str) -> str:
    """Return a prompt for people where there is little room: of a conversation the last message of the user."""
    messages = _shown(prompt)
    if messages is None:
        return prompt
    asked = [each for each in messages if each.get("role") == "user"] or messages
    return _printable(text_of(asked[-1].get("content")))


def answer_begun(prompt: str) -> str:
    """Return how a prompt begins the answer: the assistant's last message, which is continued; empty without one."""
    messages = _shown(prompt)
    if messages is None or messages[-1].get("role") != "assistant":
        return ""
    return text_of(messages[-1].get("content"))


def with_image_blocks(messages: Sequence[Message], images: int) -> list[Message]:
    """Return a conversation whose contents are blocks, with a block for each of its images.

    Its own blocks of images stay; without any, they come first in its first user message, as in TRL's
    `prepare_multimodal_messages`. InputError if it names another number of images.
    """
    found = [{**each, "content": _blocks(each["content"])} for each in messages]
    named = sum(block["type"] == "image" for each in found for block in each["content"])
    if named == 0 and images:
        first = next((each for each in found if each["role"] == "user"), found[0])
        first["content"][:0] = [{"type": "image"} for _ in range(images)]
    elif named != images:
        hint = f"It names {named} images, and has {images}; name each once, or none."
        raise InputError("prompt", write_messages(messages), hint)
    return found


def _blocks(content: str | list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return filled_blocks(content)


def filled_blocks(blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Leave out null keys, which tables give to all blocks and which some chat templates take for images."""
    return [{name: value for name, value in block.items() if value is not None} for block in blocks]


def with_images(prompt: str, images: Sequence[object] | None) -> str | list[Message]:
    """Return a prompt as TRL gives it to rewards: a plain text, or the messages with their images (None: no change)."""
    messages = read_messages(prompt)
    if messages is None or images is None:
        return prompt if messages is None else messages
    found, given = with_image_blocks(messages, len(images)), iter(images)
    for block in (block for each in found for block in each["content"] if block["type"] == "image"):
        block["image"] = next(given)
    return found


_PRINTED_BLOCK = re.compile(r"""['"]type['"]: *['"]text['"]""")


def render_messages(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], **arguments: Any) -> str:
    """Format messages with the tokenizer's own call; blocks of texts are joined for a template that knows texts only.

    TemplateError, ValueError or TypeError if the template refuses them.
    """
    from jinja2 import TemplateError

    render = partial(tokenizer.apply_chat_template, tokenize=False, **arguments)
    cleaned = [
        each if isinstance(each["content"], str) else {**each, "content": filled_blocks(each["content"])}
        for each in messages
    ]
    blocks = [block for each in cleaned if isinstance(each["content"], list) for block in each["content"]]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    if not blocks or len(texts) < len(blocks):
        printed: str = render(cleaned)
        return printed
    with suppress(TemplateError, ValueError, TypeError):
        printed = render(cleaned)
        # A template that knows texts only writes the list of blocks itself, or nothing of it.
        listed = sum(len(_PRINTED_BLOCK.findall(text)) for text in texts) < len(_PRINTED_BLOCK.findall(printed))
        if not listed and all(text.strip() in printed for text in texts):
            return printed
    printed = render([{**each, "content": text_of(each["content"])} for each in cleaned])
    return printed
