"""Messages -> the text that a model's chat template prints."""

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from grpo_core.rollouts.messages import Message, filled_blocks, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PRINTED_BLOCK = re.compile(r"""['"]type['"]: *['"]text['"]""")


def render_messages(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], **arguments: Any) -> str:
    """Format messages with the tokenizer's own call; blocks of texts are joined for a template that knows texts only.

    TemplateError, ValueError or TypeError if the template refuses them.
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
