"""Features of images: computed once a prompt, shared by its samples, and given to the model in place of pixels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling


@dataclass(frozen=True)
class ImageFeatures:
    """The features of one prompt's images, as `get_image_features` of transformers returns them.

    Attributes:
        pooled: that replace placeholders: a tensor for each image, or one of all images or tiles.
        deepstack: by layer, those of each image that are added behind it (Qwen3-VL); mostly empty.
    """

    pooled: Tensor | tuple[Tensor, ...]
    deepstack: tuple[tuple[Tensor, ...], ...] = ()

    def to(self, device: torch.device) -> "ImageFeatures":
        """Return them on a device."""
        pooled = self.pooled.to(device) if isinstance(self.pooled, Tensor) else _moved(self.pooled, device)
        return ImageFeatures(pooled, tuple(_moved(layer, device) for layer in self.deepstack))

    @property
    def nbytes(self) -> int:
        """Their memory."""
        parts = (self.pooled,) if isinstance(self.pooled, Tensor) else self.pooled
        return sum(each.nbytes for each in (*parts, *(each for layer in self.deepstack for each in layer)))


def _moved(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(each.to(device) for each in tensors)


def moved_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a processor returned on the model's device, numbers that are no ids in its dtype."""
    device, dtype = model.device, model.dtype
    return {
        name: each.to(device, dtype if each.is_floating_point() else None) if isinstance(each, Tensor) else each
        for name, each in inputs.items()
    }


def image_features(model: Any, pixels: Mapping[str, Any]) -> ImageFeatures:
    """Compute the features of one prompt's images.

    Args:
        model: without peft's wrapper.
        pixels: as its processor returns them.
    """
    found = model.base_model.get_image_features(**moved_inputs(model, pixels), return_dict=True)
    pooled = found.pooler_output if isinstance(found.pooler_output, Tensor) else tuple(found.pooler_output)
    deepstack = getattr(found, "deepstack_features", None) or ()
    return ImageFeatures(pooled, tuple(tuple(layer) for layer in deepstack))


def join_features(parts: Sequence[ImageFeatures]) -> Any:
    """Return the features of several rows, in the form of the model's own output.

    Args:
        parts: at least one, in the order of the rows; rows without images have none.
    """
    joined = BaseModelOutputWithPooling()
    whole = [part.pooled for part in parts if isinstance(part.pooled, Tensor)]
    single = [each for part in parts if not isinstance(part.pooled, Tensor) for each in part.pooled]
    joined.pooler_output = torch.cat(whole) if whole else single
    if parts[0].deepstack:
        layers = zip(*(part.deepstack for part in parts), strict=True)
        joined.deepstack_features = [[each for part in layer for each in part] for layer in layers]
    return joined


@dataclass(frozen=True)
class ImageInputs:
    """What a model reads of each prompt beside its ids and their positions.

    Attributes:
        features: of each prompt's images; None without images.
        token_types: by the model's argument, 0 where padded.
        completion_type: the type of the ids of completions.
    """

    features: tuple[ImageFeatures | None, ...]
    token_types: Mapping[str, Int[Tensor, "prompts length"]]
    completion_type: int

    def select(self, rows: Int[Tensor, " rows"]) -> "ImageInputs":
        """Return those of these prompts, in this order, repetitions allowed."""
        types = {name: each[rows] for name, each in self.token_types.items()}
        return ImageInputs(tuple(self.features[row] for row in rows.tolist()), types, self.completion_type)

    def arguments(self, time: int) -> Mapping[str, Any]:
        """Return the model's arguments for the prompts with `time` tokens of their completions."""
        found: dict[str, Any] = {
            name: nn.functional.pad(each, (0, time), value=self.completion_type)
            for name, each in self.token_types.items()
        }
        given = [each for each in self.features if each is not None]
        return {**found, "mm_encoder_outputs": {"image": join_features(given)}} if given else found
