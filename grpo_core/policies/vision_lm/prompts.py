"""Prompts with images -> ids and pixels, one prompt at a time.

What a processor returns for several prompts does not say which pixels belong to which of them: patches or tiles of all
images stand one after another, or are padded to the most tiles. One prompt alone has nobody else's.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from grpo_core.errors import InputError, first_line
from grpo_core.messages import IMAGE_MARK, Message, read_messages, refuse_messages, with_image_blocks
from grpo_core.policies.causal_lm.prompts import print_messages, uses_template
from grpo_core.policies.vision_lm.settings import VisionLMSettings

_TOKEN_TYPES = "token_type_ids"
_PLACEHOLDER_FIELD = re.compile(
    r"\w*(image|img|vision|video|audio|boi|eoi)\w*_(token_id|token_index|token_ids)|(image|video)_token"
)
_SIZE = (64, 64)


@dataclass(frozen=True)
class Placeholders:
    """The ids that a model reads as images or as parts of them, which no text contains.

    Attributes:
        image: the id that each feature of an image replaces.
        ids: all of them, ascending; they are never sampled.
        completion_type: the token type of a completion's ids, for models that have token types.
    """

    image: int
    ids: tuple[int, ...]
    completion_type: int


@dataclass(frozen=True)
class ProcessedPrompt:
    """One prompt as its processor returns it.

    Attributes:
        ids: with a placeholder for each feature of its images.
        token_types: by the model's argument, one for each id.
        pixels: arguments of the model's image encoder; empty without images.
    """

    ids: list[int]
    token_types: Mapping[str, Tensor]
    pixels: Mapping[str, Any]


def placeholder_fields(config: Any) -> dict[str, int]:
    """Return the ids of a configuration that stand for images or other media, by the names of their fields."""
    values = config.to_dict()
    found = {name: value for name, value in values.items() if _PLACEHOLDER_FIELD.fullmatch(name)}
    return {name: value for name, value in found.items() if isinstance(value, int) and not isinstance(value, bool)}


def find_placeholders(config: Any, processor: Any) -> Placeholders:
    """Find the ids that stand for images: those of the configuration, and those that the processor puts around one.

    Args:
        config: of the model.
        processor: of the same folder.

    Raises:
        InputError: the model has no placeholder of images, or the processor cannot process an image.
    """
    image = getattr(config, "image_token_id", None)
    if image is None:
        hint = "Its configuration has no image_token_id: it does not read images in place of ids, and cannot be used."
        raise InputError("policy.model", config.name_or_path, hint)
    tokenizer, mark = processor.tokenizer, image_mark(processor)
    try:
        probed = _call(processor, text=[mark], images=[[Image.new("RGB", _SIZE)]])
    except Exception as error:
        # Its code may raise anything.
        hint = f"Its processor cannot process one image of {_SIZE[0]}x{_SIZE[1]} pixels ({first_line(error)})."
        raise InputError("policy.model", config.name_or_path, hint) from error
    ids = torch.as_tensor(probed["input_ids"])[0]
    added = set(tokenizer.added_tokens_decoder) & set(ids.tolist())
    of_texts = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    named = set(placeholder_fields(config).values()) | {image, tokenizer.convert_tokens_to_ids(mark)}
    # A type of its own for images leaves completions at 0; where images are of type 0 too, it is that of the prompt.
    types = probed.get(_TOKEN_TYPES)
    of_images = 1 if types is None else int(torch.as_tensor(types)[0][ids == image].amax())
    return Placeholders(image, tuple(sorted((named | added) - of_texts)), 1 - of_images)


def _call(processor: Any, **arguments: Any) -> Any:
    with warnings.catch_warnings():
        # Some processors read tensors as arrays in a way that numpy deprecates.
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        return processor(**arguments, return_tensors="pt")


def image_mark(processor: Any) -> str:
    """Return the text that the processor replaces by an image's placeholders.

    Raises:
        InputError: it has none.
    """
    mark = getattr(processor, "image_token", None)
    if not isinstance(mark, str):
        hint = f"{type(processor).__name__} has no image_token: it puts no images into prompts."
        raise InputError("policy.model", type(processor).__name__, hint)
    return mark


def image_messages(prompt: str, images: int) -> list[Message]:
    """Return a prompt as messages whose contents are blocks, with a block for each image.

    A plain text has as many marks `<image>` as images, or none: then the images come before it. A conversation has as
    many blocks `{"type": "image"}`, or none: then they come first in its first user message.

    Args:
        prompt: as it was given.
        images: how many it has.

    Raises:
        InputError: the prompt names another number of images.
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


def print_prompt(processor: Any, settings: VisionLMSettings, prompt: str, images: int) -> str:
    """Format a prompt with the chat template, or without one as its texts with the processor's marks of images.

    Raises:
        InputError: it names another number of images, or a mark of one in its texts, is a conversation without a
            template, or the template refuses it or prints no images.
    """
    messages = image_messages(prompt, images)
    _refuse_inside(prompt, messages, [image_mark(processor)])
    if not uses_template(processor.tokenizer, settings):
        if len(messages) > 1 or read_messages(prompt) is not None:
            hint = "It is a conversation and needs a chat template; give plain texts, or another processor."
            raise InputError("prompt", prompt, hint)
        mark = image_mark(processor)
        return "".join(mark if block["type"] == "image" else block["text"] for block in messages[0]["content"])
    printed = print_messages(processor.tokenizer, settings, messages, prompt)
    mark = image_mark(processor)
    if images and printed.count(mark) != images:
        hint = (
            f"It prints {printed.count(mark)} of {images} images; give a model whose template knows images, or false."
        )
        raise InputError("rollout.chat_template", settings.chat_template, hint)
    return printed


def _refuse_inside(prompt: str, messages: Sequence[Message], tokens: Sequence[str]) -> None:
    """Raise InputError if the texts of a prompt contain what the model reads as a part of an image."""
    texts = [block["text"] for each in messages for block in each["content"] if block["type"] == "text"]
    for token in tokens:
        if any(token in text for text in texts):
            raise InputError("prompt", prompt, f"Remove {token!r}: the model reads it as a part of an image.")


def image_sizes(processor: Any, settings: VisionLMSettings) -> dict[str, Any]:
    """Return the arguments that bound the size of images, by the name that the image processor has for it.

    Raises:
        InputError: the processor does not bound the pixels of an image.
    """
    bounds = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    given = {name: pixels for name, pixels in bounds.items() if pixels is not None}
    if not given:
        return {}
    images = processor.image_processor
    # Processors whose size is an area have a function of this name in their module.
    resize = getattr(sys.modules[type(images).__module__], "smart_resize", None)
    own = dict(images.size) if images.size is not None else {}
    if resize is None or None in (own.get("shortest_edge"), own.get("longest_edge")):
        shown = {name: value for name, value in own.items() if value is not None}
        hint = (
            f"{type(images).__name__} does not scale images to a number of pixels; its size is {shown}. Leave it out."
        )
        raise InputError(f"rollout.{next(iter(given))}", next(iter(given.values())), hint)
    # Where frames are counted, an image is as many as a patch is long.
    frames = images.temporal_patch_size if "num_frames" in inspect.signature(resize).parameters else 1
    size = {
        "shortest_edge": own["shortest_edge"] if settings.min_pixels is None else settings.min_pixels * frames,
        "longest_edge": own["longest_edge"] if settings.max_pixels is None else settings.max_pixels * frames,
    }
    size["shortest_edge"] = min(size.values()) if settings.min_pixels is None else size["shortest_edge"]
    size["longest_edge"] = max(size.values()) if settings.max_pixels is None else size["longest_edge"]
    return {"images_kwargs": {"size": size}}


def printed_ids(processor: Any, settings: VisionLMSettings, prompt: str, images: int) -> list[int]:
    """Encode a prompt as the tokenizer does, with one mark for each image; errors are those of `print_prompt`."""
    special = not uses_template(processor.tokenizer, settings)
    printed = print_prompt(processor, settings, prompt, images)
    ids: list[int] = processor.tokenizer(printed, add_special_tokens=special)["input_ids"]
    return ids


def process_prompt(
    processor: Any,
    settings: VisionLMSettings,
    prompt: str,
    images: Sequence[Image.Image],
    placeholders: Placeholders,
) -> ProcessedPrompt:
    """Encode one prompt with its images.

    Args:
        images: RGB, in the order of the prompt.
        placeholders: of the model.

    Raises:
        InputError: the prompt cannot be read, contains a placeholder as text, or the processor refuses it.
    """
    printed = print_prompt(processor, settings, prompt, len(images))
    tokens = processor.tokenizer.convert_ids_to_tokens(list(placeholders.ids))
    _refuse_inside(prompt, image_messages(prompt, len(images)), tokens)
    try:
        found = _call(
            processor,
            text=[printed],
            images=[list(images)] if images else None,
            # Only the template adds special tokens, if there is one.
            add_special_tokens=not uses_template(processor.tokenizer, settings),
            **image_sizes(processor, settings),
        )
    except InputError:
        raise
    except Exception as error:
        # Its code may raise anything on images that it does not expect, or on none.
        hint = f"The processor refuses it with {len(images)} images ({first_line(error)})."
        raise InputError("prompt", prompt, hint) from error
    values = {name: each for name, each in found.items() if name not in ("attention_mask", "labels")}
    ids = torch.as_tensor(values.pop("input_ids"))[0]
    if not len(ids):
        raise InputError("prompt", prompt, "It has no ids: the model needs at least one to start from.")
    if images and not (ids == placeholders.image).any():
        raise InputError("prompt", prompt, f"Its {len(images)} images have no place in {printed[:80]!r}.")
    types = {name: torch.as_tensor(values.pop(name))[0] for name in list(values) if name.endswith(_TOKEN_TYPES)}
    return ProcessedPrompt(ids.tolist(), types, values if images else {})
