"""Prompts with images -> ids and pixels, one prompt at a time.

What a processor returns for several prompts does not say which patches or tiles belong to which of them.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from grpo_core.errors import InputError, first_line
from grpo_core.policies.causal_lm import prompts as texts
from grpo_core.policies.causal_lm.prompts import image_messages, refuse_inside, uses_template
from grpo_core.policies.encoded_prompts import EncodedPrompt, ImageFeatures
from grpo_core.policies.vision_lm.settings import VisionLMSettings

_TOKEN_TYPES = "token_type_ids"
_PLACEHOLDER_FIELD = re.compile(
    r"\w*(image|img|vision|video|audio|boi|eoi)\w*_(token_id|token_index|token_ids)|(image|video)_token"
)
_SIZE = (64, 64)


@dataclass(frozen=True)
class Placeholders:
    """The ids, ascending, that a model reads as images or parts of them; no text contains them, and none is sampled.

    Each feature of an image replaces the id `image`; `completion_type` is the token type of a completion's ids.
    """

    image: int
    ids: tuple[int, ...]
    completion_type: int


def placeholder_fields(config: Any) -> dict[str, int]:
    """Return the ids of a configuration that stand for images or other media, by the names of their fields."""
    values = config.to_dict()
    found = {name: value for name, value in values.items() if _PLACEHOLDER_FIELD.fullmatch(name)}
    return {name: value for name, value in found.items() if isinstance(value, int) and not isinstance(value, bool)}


def find_placeholders(config: Any, processor: Any) -> Placeholders:
    """Find the ids that stand for images: those of the configuration, and those that the processor puts around one.

    InputError if the model has no placeholder of images, or the processor cannot process an image.
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
    """Return the text that the processor replaces by an image's placeholders; InputError without one."""
    mark = getattr(processor, "image_token", None)
    if not isinstance(mark, str):
        hint = f"{type(processor).__name__} has no image_token: it puts no images into prompts."
        raise InputError("policy.model", type(processor).__name__, hint)
    return mark


def print_prompt(processor: Any, settings: VisionLMSettings, prompt: str, images: int) -> str:
    """Format a prompt as that of a text, with the processor's mark for each image; errors are the same."""
    return texts.print_prompt(processor.tokenizer, settings, prompt, images, image_mark(processor))


def printed_ids(processor: Any, settings: VisionLMSettings, prompt: str, images: int) -> list[int]:
    """Encode a prompt as the tokenizer does, with one mark for each image; errors are those of `print_prompt`."""
    return texts.prompt_ids(processor.tokenizer, settings, prompt, images, image_mark(processor))


def image_sizes(processor: Any, settings: VisionLMSettings) -> dict[str, Any]:
    """Return the arguments that bound the size of images, as the image processor names them; or InputError."""
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
    low = own["shortest_edge"] if settings.min_pixels is None else settings.min_pixels * frames
    high = own["longest_edge"] if settings.max_pixels is None else settings.max_pixels * frames
    # Bounds of the settings go before those of the processor.
    if settings.min_pixels is None:
        low = min(low, high)
    if settings.max_pixels is None:
        high = max(low, high)
    return {"images_kwargs": {"size": {"shortest_edge": low, "longest_edge": high}}}


def process_prompt(
    processor: Any,
    settings: VisionLMSettings,
    prompt: str,
    images: Sequence[Image.Image],
    placeholders: Placeholders,
) -> EncodedPrompt:
    """Encode one prompt with its RGB images, in its order; `place_prompt` adds positions.

    InputError if the prompt contains a placeholder as text, or template or processor refuse it.
    """
    printed = print_prompt(processor, settings, prompt, len(images))
    tokens = processor.tokenizer.convert_ids_to_tokens(list(placeholders.ids))
    refuse_inside(prompt, image_messages(prompt, len(images)), tokens)
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
    return EncodedPrompt(
        ids=ids.tolist(),
        token_types=types,
        pixels=values if images else {},
        marked=printed_ids(processor, settings, prompt, len(images)),
    )


def place_prompt(model: Any, prompt: EncodedPrompt) -> EncodedPrompt:
    """Add the positions of a prompt's ids by the model's rule for images, and leave out types that it ignores."""
    taken = inspect.signature(model.base_model.forward).parameters
    kept = {name: each for name, each in prompt.token_types.items() if name in taken}
    rule = getattr(model.base_model, "get_rope_index", None)
    if rule is None:
        return replace(prompt, positions=torch.arange(len(prompt.ids)), token_types=kept)
    # The processor names its outputs as the model names what they are for.
    known = inspect.signature(rule).parameters
    given = {name: each for name, each in prompt.pixels.items() if name in known}
    types = {name: each.unsqueeze(0) for name, each in prompt.token_types.items() if name in known}
    ids = torch.tensor([prompt.ids])
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types, **given}
    positions, _ = rule(**{name: each.to(model.device) for name, each in arguments.items()})
    return replace(prompt, positions=positions[:, 0].cpu(), token_types=kept)


def moved_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a processor returned on the model's device, numbers that are no ids in its dtype."""
    device, dtype = model.device, model.dtype
    return {
        name: each.to(device, dtype if each.is_floating_point() else None) if isinstance(each, Tensor) else each
        for name, each in inputs.items()
    }


def image_features(model: Any, pixels: Mapping[str, Any]) -> ImageFeatures:
    """Compute the features of one prompt's images by their pixels, as the processor returns them."""
    found = model.base_model.get_image_features(**moved_inputs(model, pixels), return_dict=True)
    pooled = found.pooler_output if isinstance(found.pooler_output, Tensor) else tuple(found.pooler_output)
    deepstack = getattr(found, "deepstack_features", None) or ()
    return ImageFeatures(pooled, tuple(tuple(layer) for layer in deepstack))
