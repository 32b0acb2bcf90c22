"""Whether a vision-language model can be sampled and scored, and sees its images, tried on a small copy of it.

Log-probs are compared with those of a plain forward pass that is given the pixels. Parity alone would pass a model that
looks at no image: another image has to change its log-probs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.compatibility import (
    TEXT_IDS,
    Trial,
    refuse_reason,
    refuse_tried,
    sample_trial,
    score_trial,
    try_copies,
    why_trial_fails,
)
from grpo_core.policies.causal_lm.loading import vocabulary_size
from grpo_core.policies.causal_lm.small_copy import IDS, LIMITS, WINDOWS, build_small, small_values
from grpo_core.policies.vision_lm.encoding import ReadPrompt, encode_read, read_prompt
from grpo_core.policies.vision_lm.features import image_features
from grpo_core.policies.vision_lm.prompts import (
    Placeholders,
    ProcessedPrompt,
    find_placeholders,
    placeholder_fields,
    process_prompt,
)
from grpo_core.policies.vision_lm.settings import VisionLMSettings

PAGE = "docs/vision.md"
_LAYERS = 4
_DEPTH = ("num_hidden_layers", "depth", "num_layers")
_NUMBERS = re.compile(r"\w+_index(es)?")

BLIND = 1e-4
"""In nats, by which another image has to change a log-prob; rounding is a few millionths."""

# A window that is shorter than the prompts, through which the ends of these see their images.
_WITH_IMAGES = {**LIMITS, **dict.fromkeys(WINDOWS, 32)}
_TEXTS = ("What is it?", "And the colours of it, one after another?", "No image.")
_SIZES = ((64, 64), (112, 84))
_WIDTH = re.compile(r"\w*(hidden_size|hidden_dim|embed_dim|projection_dim|projector_dim|out_dim|dim|width|output_size)")


def refuse_incompatible(name: str, config: Any, processor: Any) -> bool:
    """Try a small copy of a model; no weights are read.

    Args:
        name: of the model, for the error.
        config: its configuration.
        processor: of the same folder.

    Returns:
        False if no small copy can be built, so that only the model itself can answer.

    Raises:
        InputError: the model cannot be sampled and scored here, or its processor cannot process prompts with images.
    """
    prompts = trial_prompts(config, processor)
    return refuse_tried(name, config, f" {name}", partial(try_copy, config, *prompts), PAGE)


def refuse_incompatible_model(name: str, model: Any, processor: Any) -> None:
    """Raise InputError if this model, with its weights, cannot be sampled and scored here, or sees no image."""
    placeholders, *prompts = trial_prompts(model.config, processor)
    vocabulary = vocabulary_size(model, processor.tokenizer)
    reason = why_incompatible(model, placeholders, *prompts, vocabulary=vocabulary)
    refuse_reason(name, model.config, reason, PAGE)


def trial_prompts(
    config: Any, processor: Any
) -> tuple[Placeholders, Sequence[ProcessedPrompt], Sequence[ProcessedPrompt]]:
    """Return the placeholders of a model, prompts to try it on, and the same prompts with other images.

    Raises:
        InputError: the processor cannot process prompts with images.
    """
    placeholders, settings = find_placeholders(config, processor), VisionLMSettings()

    def processed(text: str, *images: Image.Image) -> ProcessedPrompt:
        return process_prompt(processor, settings, text, images, placeholders)

    seen, others = (
        [processed(text, _picture(size, turned)) for text, size in zip(_TEXTS, _SIZES, strict=False)]
        for turned in (False, True)
    )
    try:
        without = [processed(_TEXTS[-1])]
    except InputError:
        # Some models read no prompt without an image.
        without = []
    return placeholders, [*seen, *without], [*others, *without]


def _picture(size: tuple[int, int], turned: bool) -> Image.Image:
    """Return a picture of stripes, or of other stripes, so that no part of it is alike."""
    ramp = Image.linear_gradient("L").resize(size)
    across = Image.linear_gradient("L").rotate(90).resize(size)
    stripes = across.point([255 * (level // 16 % 2) for level in range(256)])
    return Image.merge("RGB", (stripes, ramp, across) if turned else (ramp, across, stripes))


def try_copy(
    config: Any, placeholders: Placeholders, prompts: Sequence[ProcessedPrompt], others: Sequence[ProcessedPrompt]
) -> tuple[bool, str | None]:
    """Return whether a small copy could be built, and why it cannot be used, if so; arguments of `trial_prompts`."""
    ids = _small_ids(config, placeholders)
    small = replace(placeholders, image=ids[placeholders.image], ids=tuple(sorted({ids[each] for each in ids})))

    def renamed(prompt: ProcessedPrompt) -> ProcessedPrompt:
        return replace(prompt, ids=[ids.get(each, 5 + each % (TEXT_IDS - 5)) for each in prompt.ids])

    return try_copies(
        partial(small_copy, config, ids),
        lambda copy: why_incompatible(
            copy, small, [*map(renamed, prompts)], [*map(renamed, others)], vocabulary=TEXT_IDS
        ),
    )


def _small_ids(config: Any, placeholders: Placeholders) -> dict[int, int]:
    """Return the id in a small copy of each id that stands for images; those that the model knows are not shared."""
    known = [placeholders.image, *placeholder_fields(config).values(), *placeholders.ids]
    return {each: min(TEXT_IDS + index, IDS - 1) for index, each in enumerate(dict.fromkeys(known))}


def small_copy(config: Any, ids: Mapping[int, int], seed: int) -> Any | None:
    """Build the copy, in evaluation mode, in fp32 on the CPU.

    Args:
        config: of the model.
        ids: the copy's id of each that stands for images.
        seed: of the random weights.

    Returns:
        None if there is no small copy of this configuration that can be built.
    """
    try:
        model = build_small(AutoModelForImageTextToText, type(config).from_dict(_small_config(config, ids)), seed)
    except Exception:
        # Whatever a configuration of other widths, or a model without its defaults, trips over.
        return None
    if model is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Some projectors begin at zero: an untrained copy would see nothing.
            if parameter.ndim >= 2 and not parameter.any():
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def _small_config(config: Any, ids: Mapping[int, int]) -> dict[str, Any]:
    """Return the values of a configuration whose parts are narrow, and still fit together."""
    values, text = config.to_dict(), config.get_text_config()
    name = next(each for each in values if getattr(config, each, None) is text)
    inside = _shallow(small_values(values[name], _WITH_IMAGES))
    widths = {text.hidden_size: inside["hidden_size"]}
    parts = {each: value for each, value in values.items() if isinstance(value, dict) and each.endswith("_config")}
    own = {each: value for each, value in values.items() if each not in parts}
    return {
        **_joined(own, widths),
        **{each: _shallow(_joined(value, widths)) for each, value in parts.items()},
        **{each: ids[value] for each, value in placeholder_fields(config).items()},
        name: inside,
    }


def _joined(values: Mapping[str, Any], widths: Mapping[int, int]) -> dict[str, Any]:
    """Return small values in which a width of the language model is that of its copy.

    Nothing has a limit: the windows of an image encoder are in pixels.
    """
    wide = {
        name: widths[value]
        for name, value in values.items()
        if isinstance(value, int) and value in widths and _WIDTH.fullmatch(name)
    }
    return {**small_values(values, {}), **wide}


def _shallow(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with fewer layers, of each kind that there is; prompts with images are long."""
    name = next((each for each in _DEPTH if isinstance(values.get(each), int)), None)
    if name is None or values[name] <= _LAYERS:
        return dict(values)
    layers = values[name]
    lists = {each: value for each, value in values.items() if isinstance(value, list) and value}
    kinds = [value for value in lists.values() if len(value) == layers]
    left = next(count for count in range(_LAYERS, layers + 1) if all(set(each[:count]) == set(each) for each in kinds))
    # Of lists that number layers, as many numbers.
    numbered = {each: value for each, value in lists.items() if _NUMBERS.fullmatch(each) and value not in kinds}
    return {
        **values,
        name: left,
        **{each: value[:left] for each, value in lists.items() if len(value) == layers},
        **{each: [min(index, left - 1) for index in range(len(value))] for each, value in numbered.items()},
    }


@torch.no_grad()
def why_incompatible(
    model: Any,
    placeholders: Placeholders,
    prompts: Sequence[ProcessedPrompt],
    others: Sequence[ProcessedPrompt],
    *,
    vocabulary: int,
) -> str | None:
    """Return why a model cannot be sampled and scored here, or that it sees no image; None if it can and does.

    Args:
        model: without peft's wrapper.
        placeholders: its ids that stand for images.
        prompts: to be sampled, some with images.
        others: the same prompts with other images of the same sizes.
        vocabulary: ids [0, vocabulary) are sampled, except placeholders.
    """
    left_out = [each for each in placeholders.ids if each < vocabulary]

    @cache
    def prepared(other: bool) -> Trial:
        given = others if other else prompts
        read = [read_prompt(model, each) for each in given]
        features = [image_features(model, each.processed.pixels) if each.processed.pixels else None for each in read]
        encoded = encode_read(model, read, features, placeholders.completion_type)
        forbidden = torch.tensor(left_out, dtype=torch.long, device=model.device)
        return Trial(encoded, vocabulary, partial(_plain_logits, model, read, placeholders), forbidden)

    return why_trial_fails(model, partial(prepared, False)) or _why_blind(model, prepared(False), prepared(True))


def _plain_logits(
    model: Any, read: Sequence[ReadPrompt], placeholders: Placeholders, index: int, written: Tensor
) -> Tensor:
    """Return the logits of a completion of one forward pass that is given what the processor returned."""
    prompt, device = read[index].processed, model.device
    time = len(written)
    ids = torch.cat([torch.tensor(prompt.ids, device=device), written]).unsqueeze(0)
    types = {
        name: torch.nn.functional.pad(each, (0, time), value=placeholders.completion_type).unsqueeze(0).to(device)
        for name, each in prompt.token_types.items()
    }
    pixels = {
        name: each.to(device, model.dtype if each.is_floating_point() else None) if isinstance(each, Tensor) else each
        for name, each in prompt.pixels.items()
    }
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **types, **pixels).logits
    return logits[0, len(prompt.ids) - 1 : -1]


def _why_blind(model: Any, trial: Trial, other: Trial) -> str | None:
    ids = sample_trial(model, trial).actions.token_ids.to(model.device)
    changed = (score_trial(model, trial, ids) - score_trial(model, other, ids)).abs().amax(-1)
    # Each prompt with an image is sampled as often as any other.
    by_prompt = changed.view(len(trial.prompts.input_ids), -1).amax(-1)
    seen = [float(by_prompt[index]) for index in range(len(_SIZES))]
    if not min(seen) > BLIND:
        return f"another image changes its log-probs by {min(seen):.2g} nats only: it does not see its images"
    return None
