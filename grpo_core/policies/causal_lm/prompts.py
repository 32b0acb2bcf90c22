"""Prompts of texts, with images or without -> what the chat template prints -> ids."""

import datetime
import json
import re
import string
from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.settings import CausalLMSettings, Context
from grpo_core.policies.encoded_prompts import EncodedPrompt
from grpo_core.rollouts.messages import (
    IMAGE_MARK,
    Message,
    read_messages,
    refuse_messages,
    render_messages,
    with_image_blocks,
)

# Some templates print today's date, so the prompt would differ when it is scored on another day. transformers hands a
# template no functions but its own, so theirs is hidden by a macro; what each code prints is Python's own.
_FIRST_OF_2025 = datetime.datetime(2025, 1, 1)
_CODES = [
    (code, _FIRST_OF_2025.strftime(code))
    for code in (f"%{flag}{letter}" for flag in ("", *"-_0^#EO") for letter in string.ascii_letters)
]
_CLOCK = "strftime_now"
_FIXED_CLOCK = (
    "{%- macro strftime_now(format) -%}{%- set day = namespace(text=format | replace('%%', '\x00')) -%}"
    f"{{%- for code, value in {json.dumps(_CODES)} -%}}"
    "{%- set day.text = day.text | replace(code, value) -%}{%- endfor -%}"
    "{{ day.text | replace('\x00', '%') }}{%- endmacro -%}"
)

_LAST_TAGS = re.compile(r"(?:<[A-Za-z][\w-]*>\s*)+\Z")


def uses_template(tokenizer: PreTrainedTokenizerBase, settings: CausalLMSettings) -> bool:
    """Return whether prompts are formatted with the tokenizer's chat template; InputError without a needed one."""
    has_template = bool(tokenizer.chat_template)
    if settings.chat_template and not has_template:
        raise InputError("rollout.chat_template", True, "This tokenizer has no chat template; set it to false or null.")
    uses = has_template if settings.chat_template is None else settings.chat_template
    if settings.system_prompt is not None and not uses:
        hint = "It needs a chat template; leave it out, or write it into the prompts."
        raise InputError("rollout.system_prompt", settings.system_prompt, hint)
    return uses


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    settings: CausalLMSettings,
    prompt: str,
    images: int = 0,
    mark: str | None = None,
) -> list[int]:
    """Encode one prompt without padding, with one mark for each image; arguments and errors of `print_prompt`.

    Only the template adds special tokens, if there is one; else the tokenizer does. InputError for no ids.
    """
    printed = print_prompt(tokenizer, settings, prompt, images, mark)
    ids: list[int] = tokenizer(printed, add_special_tokens=not uses_template(tokenizer, settings))["input_ids"]
    if not ids:
        raise InputError("prompt", prompt, "It has no ids: the model needs at least one to start from.")
    return ids


def print_prompt(
    tokenizer: PreTrainedTokenizerBase,
    settings: CausalLMSettings,
    prompt: str,
    images: int = 0,
    mark: str | None = None,
) -> str:
    """Format a prompt with the chat template, or without one as it is, with a mark for each of its images.

    A conversation that ends with the assistant's words is continued, as by TRL's `apply_chat_template`. A template that
    prints the date prints the same one every day. The processor replaces a mark by an image's placeholders; None: the
    model reads texts alone. InputError for another number of images, a mark in a text, a conversation without a
    template, and what the template refuses or does not print.
    """
    given = read_messages(prompt)
    if mark is not None:
        messages = image_messages(prompt, images)
        refuse_inside(prompt, messages, [mark])
    else:
        messages = given or [{"role": "user", "content": prompt}]
        if given is not None:
            refuse_messages(given, "prompt", images=False)
    if not uses_template(tokenizer, settings):
        if given is not None:
            hint = "It is a conversation and needs a chat template; give plain texts, or another tokenizer."
            raise InputError("prompt", prompt, hint)
        if mark is None:
            return prompt
        return "".join(mark if block["type"] == "image" else block["text"] for block in messages[0]["content"])
    printed = print_messages(tokenizer, settings, messages, prompt)
    found = images if mark is None else printed.count(mark)
    if images and found != images:
        hint = f"It prints {found} of {images} images; give a model whose template knows images, or false."
        raise InputError("rollout.chat_template", settings.chat_template, hint)
    return printed


def image_messages(prompt: str, images: int) -> list[Message]:
    """Return a prompt with this many images as messages whose contents are blocks, with a block for each image.

    A plain text has as many marks `<image>`, or none: then the images come before it. A conversation has as many blocks
    `{"type": "image"}`, or none: then they come first in its first user message. InputError for another number.
    """
    messages = read_messages(prompt)
    if messages is None:
        messages = [{"role": "user", "content": _blocks(prompt, images)}]
    else:
        refuse_messages(messages, "prompt", images=True)
    return with_image_blocks(messages, images)


def _blocks(text: str, images: int) -> list[dict[str, str]]:
    parts = text.split(IMAGE_MARK)
    if len(parts) == 1 or not images:
        return _text(text)
    blocks = [[{"type": "image"}, *_text(part)] for part in parts[1:]]
    return [*_text(parts[0]), *(block for each in blocks for block in each)]


def _text(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []


def refuse_inside(prompt: str, messages: Sequence[Message], tokens: Sequence[str]) -> None:
    """Raise InputError if the texts of a prompt contain what the model reads as a part of an image."""
    texts = [block["text"] for each in messages for block in each["content"] if block["type"] == "text"]
    for token in tokens:
        if any(token in text for text in texts):
            raise InputError("prompt", prompt, f"Remove {token!r}: the model reads it as a part of an image.")


def print_messages(
    tokenizer: PreTrainedTokenizerBase, settings: CausalLMSettings, messages: Sequence[Message], prompt: str
) -> str:
    """Format a conversation with the chat template, after the system prompt of the settings if it has none.

    InputError if the template refuses it, with the prompt as it was given.
    """
    system = settings.system_prompt
    if system is not None and all(message["role"] != "system" for message in messages):
        content = system if isinstance(messages[0]["content"], str) else [{"type": "text", "text": system}]
        messages = [{"role": "system", "content": content}, *messages]
    continued = messages[-1]["role"] == "assistant"
    template = tokenizer.get_chat_template()
    fixed = _FIXED_CLOCK + template if _CLOCK in template else template
    try:
        return render_messages(
            tokenizer,
            messages,
            chat_template=fixed,
            add_generation_prompt=not continued,
            continue_final_message=continued,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise InputError("prompt", prompt, f"The chat template refuses it ({error}).") from error


def answer_start(tokenizer: PreTrainedTokenizerBase, settings: CausalLMSettings) -> str:
    """Return how the chat template begins every answer, such as with `<think>`: the tags that end a prompt."""
    if not uses_template(tokenizer, settings):
        return ""
    try:
        printed = print_messages(
            tokenizer, settings, [{"role": "user", "content": [{"type": "text", "text": "?"}]}], "?"
        )
    except InputError:
        return ""
    found = _LAST_TAGS.search(printed)
    # Tokens that no decoded answer has are the form of a message, not a part of it; so are names of roles.
    form = {*tokenizer.all_special_tokens, "<assistant>", "<model>"}
    return "" if found is None or any(tag in found[0] for tag in form) else found[0]


def require_room(prompt: str, length: int, settings: CausalLMSettings, context: Context, of_images: int = 0) -> None:
    """Raise InputError for a prompt of `length` ids that leaves no room for a completion of full length."""
    room = None if context.length is None else context.length - settings.max_completion_length
    if room is not None and length > room:
        those = f", {of_images} of them of its images" if of_images else ""
        shown = prompt if len(prompt) <= 80 else f"{prompt[:80]}..."
        hint = (
            f"It has {length} ids{those}, and at most {room} leave room for max_completion_length "
            f"{settings.max_completion_length} in the model's {context}. Shorten it, or lower "
            "rollout.max_completion_length."
        )
        raise InputError("prompt", shown, hint)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, settings: CausalLMSettings, prompt: str, *, context: Context
) -> EncodedPrompt:
    """Encode a text; InputError if it cannot be read or leaves no room for a completion."""
    ids = prompt_ids(tokenizer, settings, prompt)
    require_room(prompt, len(ids), settings, context)
    return EncodedPrompt(ids)
