"""Processed prompts -> what the model reads, and the prompts that were read last."""

import inspect
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from grpo_core.policies.causal_lm.prompts import EncodedPrompts, pad_left
from grpo_core.policies.vision_lm.features import ImageFeatures, ImageInputs
from grpo_core.policies.vision_lm.prompts import ProcessedPrompt

CACHE_BYTES = 4 * 1024**3
"""Memory of the CPU for prompts with their features, or with their pixels where the encoder is trained."""
_ID_BYTES = 64
"""Of an id in a list, with its position and its types."""


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt that was processed.

    Attributes:
        processed: its ids and, while the features are not kept, its pixels.
        positions: of its ids, in one row, or in three by time, height and width.
        features: of its images, in CPU memory; None without images, or while they are not kept.
    """

    processed: ProcessedPrompt
    positions: Int[Tensor, "..."]
    features: ImageFeatures | None = None

    @property
    def nbytes(self) -> int:
        """Its memory, about."""
        pixels = (each for each in self.processed.pixels.values() if isinstance(each, Tensor))
        return (
            _ID_BYTES * len(self.processed.ids)
            + sum(each.nbytes for each in pixels)
            + (0 if self.features is None else self.features.nbytes)
        )

    def keeping(self, features: ImageFeatures) -> "ReadPrompt":
        """Return it with its features in place of its pixels."""
        return replace(self, processed=replace(self.processed, pixels={}), features=features.to(torch.device("cpu")))


@dataclass
class PromptStore:
    """The prompts that were read last, as many as fit into a number of bytes.

    Attributes:
        limit: most bytes.
        held: from the one whose last use is longest ago.
    """

    limit: int = CACHE_BYTES
    held: OrderedDict[Hashable, ReadPrompt] = field(default_factory=OrderedDict)

    def get(self, key: Hashable) -> ReadPrompt | None:
        """Return what is kept under a key."""
        if key in self.held:
            self.held.move_to_end(key)
        return self.held.get(key)

    def put(self, key: Hashable, prompt: ReadPrompt) -> None:
        """Keep a prompt, and give up those whose last use is longest ago; one that is too large is not kept."""
        self.held[key] = prompt
        self.held.move_to_end(key)
        size = sum(each.nbytes for each in self.held.values())
        while size > self.limit:
            size -= self.held.popitem(last=False)[1].nbytes


def read_prompt(model: Any, processed: ProcessedPrompt) -> ReadPrompt:
    """Find the positions of a prompt's ids: in one row, or in three where the model has a rule for images of its own.

    Positions are given to the model explicitly, always: a model with places in time, height and width takes those of
    the previous caller, or plain ones, without a warning.

    Args:
        model: without peft's wrapper.
    """
    rule = getattr(model.base_model, "get_rope_index", None)
    if rule is None:
        return ReadPrompt(processed, torch.arange(len(processed.ids)))
    device = model.device
    # The processor names its outputs as the model names what they are for.
    known = inspect.signature(rule).parameters
    given = {name: each for name, each in processed.pixels.items() if name in known}
    types = {name: each.unsqueeze(0) for name, each in processed.token_types.items() if name in known}
    ids = torch.tensor([processed.ids])
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types, **given}
    positions, _ = rule(**{name: each.to(device) for name, each in arguments.items()})
    return ReadPrompt(processed, positions[:, 0].cpu())


def encode_read(
    model: Any, read: Sequence[ReadPrompt], features: Sequence[ImageFeatures | None], completion_type: int
) -> EncodedPrompts:
    """Pad prompts on the left to the longest, with the features of their images.

    Args:
        model: without peft's wrapper.
        read: at least one.
        features: of each prompt's images, on the model's device; None without images.
        completion_type: the token type of a completion's ids.
    """
    device = model.device
    encoded = pad_left([each.processed.ids for each in read], device)

    def padded(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (encoded.length - values.shape[-1], 0)).to(device)

    positions = torch.stack([padded(each.positions) for each in read], read[0].positions.ndim - 1)
    names = inspect.signature(model.base_model.forward).parameters
    found = {name for each in read for name in each.processed.token_types if name in names}
    types = {
        name: torch.stack(
            [
                padded(each.processed.token_types.get(name, torch.zeros(len(each.processed.ids), dtype=torch.long)))
                for each in read
            ]
        )
        for name in sorted(found)
    }
    return replace(encoded, position_ids=positions, further=ImageInputs(tuple(features), types, completion_type))
