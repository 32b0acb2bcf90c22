"""The processor of a vision-language model by folder or hub name, and which of its parameters see images."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.loading import UNREADABLE, ModelKind, place_of, refusal


def load_processor(model: str) -> Any:
    """Load a model's processor, whose tokenizer has its chat template, or raise InputError."""
    try:
        processor = AutoProcessor.from_pretrained(place_of(model), trust_remote_code=False)
    except UNREADABLE as error:
        raise refusal(model, "processor", error) from error
    except ImportError as error:
        hint = f"Its processor needs a package that is not installed ({str(error).strip().splitlines()[0]})."
        raise InputError("policy.model", model, hint) from error
    # Without a processor's files, transformers returns the tokenizer.
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        hint = "It has no processor of images; give a folder with preprocessor_config.json, or policy.kind causal_lm."
        raise InputError("policy.model", model, hint)
    return with_template(processor)


def with_template(processor: Any) -> Any:
    """Give the chat template of a processor to its tokenizer, which formats prompts, and return the processor."""
    if processor.chat_template is not None:
        processor.tokenizer.chat_template = processor.chat_template
    return processor


def language_parameters(model: Any) -> set[int]:
    """Return the ids of the parameters of the language model and its head; InputError if it is no part of its own."""
    decoder = model.get_decoder()
    if decoder is None or decoder is model or decoder is model.base_model:
        hint = f"{type(model).__name__} has no language model of its own (get_decoder): its vision cannot be frozen."
        raise InputError("policy.freeze_vision", True, hint)
    head = model.get_output_embeddings()
    parts = [decoder, *([] if head is None else [head])]
    return {id(parameter) for part in parts for parameter in part.parameters()}


def vision_parameters(model: Any) -> list[nn.Parameter]:
    """Return the parameters outside the language model and its output head."""
    language = language_parameters(model)
    return [each for each in model.parameters() if id(each) not in language]


VISION_LM = ModelKind(
    AutoModelForImageTextToText,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "vision-language model",
    load_processor,
    outside=vision_parameters,
)


def is_vision_frozen(model: Any) -> bool:
    """Return whether nothing outside the language model is trained, so that an image's features never change."""
    return not any(each.requires_grad for each in vision_parameters(model))


def add_deepstack_by_places(model: nn.Module) -> None:
    """Have features of images that are added behind a layer (Qwen3-VL) scattered among zeros, to the bit the same.

    transformers 5.23 indexes the hidden states by a mask, twice there and twice on the way back, and the host waits for
    the GPU to count its places each time.
    """
    for module in model.modules():
        if hasattr(module, "_deepstack_process"):
            module._deepstack_process = _with_features  # type: ignore[assignment]


def _with_features(
    hidden: Float[Tensor, "rows time dim"], places: Bool[Tensor, "rows time"], features: Float[Tensor, "places dim"]
) -> Float[Tensor, "rows time dim"]:
    return hidden + torch.zeros_like(hidden).masked_scatter(places.unsqueeze(-1), features.to(hidden))
