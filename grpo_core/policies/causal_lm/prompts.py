"""Prompts -> left-padded ids. Positions are given to the model explicitly, always.

Left padding shifts every id of a short prompt. Without explicit positions, a model with absolute positions reads
another text, and log-probs depend on the batch by nats without a warning.
"""

import datetime
import json
import re
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_core.errors import InputError
from grpo_core.messages import Message, filled_blocks, read_messages, refuse_messages, text_of
from grpo_core.policies.causal_lm.settings import CausalLMSettings, Context

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
_PRINTED_BLOCK = re.compile(r"""['"]type['"]: *['"]text['"]""")


@runtime_checkable
class PromptInputs(Protocol):
    """What a model reads of each prompt beside its ids, such as the features of its images."""

    def select(self, rows: Int[Tensor, " rows"]) -> "PromptInputs":
        """Return those of these prompts, in this order, repetitions allowed."""

    def arguments(self, time: int) -> Mapping[str, Any]:
        """Return the model's arguments for the prompts with `time` tokens of their completions."""


@dataclass(frozen=True)
class EncodedPrompts:
    """Encoded prompts, left-padded to one length.

    Attributes:
        input_ids: zero where padded.
        attention_mask: 1 for a prompt id, 0 for left padding.
        position_ids: counted from the first id of the prompt; 0 where padded. For models whose ids have a place in
            time, height and width, one row of each.
        further: what else the model reads; None: nothing.
        marked: the ids of each prompt without padding, with one mark in place of each image's placeholders, for an
            engine that reads images itself; None: as they are.
    """

    input_ids: Int[Tensor, "prompts length"]
    attention_mask: Int[Tensor, "prompts length"]
    position_ids: Int[Tensor, "prompts length"] | Int[Tensor, "3 prompts length"]
    further: PromptInputs | None = None
    marked: tuple[list[int], ...] | None = None

    @property
    def length(self) -> int:
        """Number of ids of the padded prompt."""
        return self.input_ids.shape[1]

    @property
    def lengths(self) -> Int[Tensor, " prompts"]:
        """Number of ids of each prompt."""
        return self.attention_mask.sum(-1)

    @property
    def first_positions(self) -> Int[Tensor, " prompts"]:
        """Position of the first token of each prompt's completion, after the last of the prompt."""
        last = self.position_ids.amax(-1)
        return (last if last.ndim == 1 else last.amax(0)) + 1

    def positions(self, places: Int[Tensor, "prompts time"]) -> Int[Tensor, "..."]:
        """Return positions of completions in the form of those of the prompts; all places of a token are the same."""
        return places if self.position_ids.ndim == 2 else places.expand(3, -1, -1)

    def arguments(self, time: int = 0) -> Mapping[str, Any]:
        """Return what else the model reads, for the prompts with `time` tokens of their completions."""
        return {} if self.further is None else self.further.arguments(time)

    def select(self, rows: Int[Tensor, " rows"]) -> "EncodedPrompts":
        """Return these prompts, in this order, repetitions allowed."""
        further = None if self.further is None else self.further.select(rows)
        return EncodedPrompts(
            self.input_ids[rows],
            self.attention_mask[rows],
            self.position_ids[..., rows, :],
            further,
            None if self.marked is None else tuple(self.marked[row] for row in rows.tolist()),
        )


def uses_template(tokenizer: PreTrainedTokenizerBase, settings: CausalLMSettings) -> bool:
    """Return whether prompts are formatted with the tokenizer's chat template.

    Raises:
        InputError: the settings need a template and there is none.
    """
    has_template = bool(tokenizer.chat_template)
    if settings.chat_template and not has_template:
        raise InputError("rollout.chat_template", True, "This tokenizer has no chat template; set it to false or null.")
    uses = has_template if settings.chat_template is None else settings.chat_template
    if settings.system_prompt is not None and not uses:
        hint = "It needs a chat template; leave it out, or write it into the prompts."
        raise InputError("rollout.system_prompt", settings.system_prompt, hint)
    return uses


def prompt_ids(tokenizer: PreTrainedTokenizerBase, settings: CausalLMSettings, prompt: str) -> list[int]:
    """Encode one prompt without padding.

    Without a template a plain text is encoded with the special tokens that the tokenizer puts around texts. With one,
    only the template adds special tokens; a conversation that ends with the assistant's words is continued, as by TRL's
    `apply_chat_template`. A template that prints the date prints the same one every day.

    Raises:
        InputError: a conversation without a template, one that the template refuses, or a prompt without any id.
    """
    messages = read_messages(prompt)
    if messages is not None:
        refuse_messages(messages, "prompt", images=False)
    if not uses_template(tokenizer, settings):
        if messages is not None:
            hint = "It is a conversation and needs a chat template; give plain texts, or another tokenizer."
            raise InputError("prompt", prompt, hint)
        ids: list[int] = tokenizer(prompt)["input_ids"]
    else:
        text = print_messages(tokenizer, settings, messages or [{"role": "user", "content": prompt}], prompt)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise InputError("prompt", prompt, "It has no ids: the model needs at least one to start from.")
    return ids


def print_messages(
    tokenizer: PreTrainedTokenizerBase, settings: CausalLMSettings, messages: Sequence[Message], prompt: str
) -> str:
    """Format a conversation with the chat template, after the system prompt of the settings if it has none.

    Args:
        messages: at least one; blocks of texts and images.
        prompt: as it was given, for errors.

    Raises:
        InputError: the template refuses it.
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


def render_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **arguments: Any) -> str:
    """Format messages with the tokenizer's own call; blocks of texts are joined for a template that knows texts only.

    Args:
        arguments: of `apply_chat_template`.

    Raises:
        TemplateError, ValueError, TypeError: the template refuses them.
    """
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


def require_room(prompt: str, length: int, settings: CausalLMSettings, context: Context, of_images: int = 0) -> None:
    """Raise InputError for a prompt that leaves no room for a completion of full length.

    Args:
        length: number of its ids.
        context: of the model.
        of_images: how many of its ids are placeholders of images.
    """
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


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    settings: CausalLMSettings,
    prompts: Sequence[str],
    *,
    context: Context,
    device: torch.device,
) -> EncodedPrompts:
    """Encode prompts, padded on the left to the longest.

    Padding has id 0 outside the attention mask, so a tokenizer without a pad token needs none.

    Args:
        settings: template, system prompt, and the room to leave.
        context: of the model.

    Raises:
        InputError: names the first prompt that cannot be read or is too long.
    """
    rows = [prompt_ids(tokenizer, settings, prompt) for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        require_room(prompt, len(row), settings, context)
    return pad_left(rows, device)


def pad_left(rows: Sequence[list[int]], device: torch.device) -> EncodedPrompts:
    """Pad the ids of prompts on the left to the longest."""
    length = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return EncodedPrompts(ids.to(device), mask.to(device), positions.to(device))
