"""Vision-language models behind the Policy protocol: a causal language model that reads features of images."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.prompts import require_room
from grpo_core.policies.encoded_prompts import EncodedPrompt, ImageFeatures, RecentlyUsed
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.vision_lm.loading import VISION_LM, add_deepstack_by_places, is_vision_frozen
from grpo_core.policies.vision_lm.prompts import (
    find_placeholders,
    image_features,
    image_sizes,
    moved_inputs,
    place_prompt,
    process_prompt,
)
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.rollouts.images import SourceImage

_FEATURE_BYTES = 256 * 1024**2
"""On the device, for features of images; more are in CPU memory."""


class VisionLMPolicy(CausalLMPolicy):
    """A language model that answers prompts with images; it is its only component.

    The features of a prompt's images are computed once while what computes them is frozen, else once a pass.
    `placeholders` are the ids that stand for images.
    """

    kind = VISION_LM
    settings: VisionLMSettings

    def __init__(
        self,
        trained: TrainedModel,
        processor: Any,
        settings: VisionLMSettings,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.processor = processor
        super().__init__(trained, processor.tokenizer, settings, autocast=autocast)
        self.placeholders = find_placeholders(self._model.config, processor)
        left_out = [token for token in self.placeholders.ids if token < self.vocabulary and token not in self.ends]
        self.forbidden = torch.tensor(left_out, dtype=torch.long, device=self._device)
        self.vision_frozen = is_vision_frozen(self._model)
        add_deepstack_by_places(self._model)
        self._on_device = RecentlyUsed[ImageFeatures](_FEATURE_BYTES)

    def sample_with(self, settings: VisionLMSettings) -> None:  # type: ignore[override]
        """Use these settings for sampling, rendering and reading prompts from this call on."""
        image_sizes(self.processor, settings)
        super().sample_with(settings)

    def plain_logits(self, prompt: str, sources: Sequence[SourceImage], written: Tensor) -> Tensor:
        """Return logits of a completion, of one forward pass that is given what the processor returned."""
        processed, time = self._encode_prompt(prompt, sources), len(written)
        ids = torch.tensor(processed.ids + written.tolist(), device=self._device).unsqueeze(0)
        types = {
            name: nn.functional.pad(each, (0, time), value=self.placeholders.completion_type).unsqueeze(0)
            for name, each in processed.token_types.items()
        }
        given = moved_inputs(self._model, {**types, **processed.pixels})
        with self._precision():
            logits: Tensor = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits
        return logits[0, -time - 1 : -1]

    @property
    def image_arguments(self) -> Mapping[str, Any]:
        """Arguments of the image processor with the current settings."""
        arguments: Mapping[str, Any] = image_sizes(self.processor, self.settings).get("images_kwargs", {})
        return arguments

    @property
    def _completion_type(self) -> int:
        return self.placeholders.completion_type

    def _encode_prompt(self, prompt: str, images: Sequence[SourceImage]) -> EncodedPrompt:
        opened = [image.open() for image in images]
        encoded = process_prompt(self.processor, self.settings, prompt, opened, self.placeholders)
        of_images = encoded.ids.count(self.placeholders.image)
        require_room(prompt, len(encoded.ids), self.settings, self.context, of_images=of_images)
        return encoded

    def _with_features(self, key: Hashable, prompt: EncodedPrompt) -> EncodedPrompt:
        """Add positions and features of a prompt's images, and keep features while what computes them is frozen."""
        if prompt.positions is None:
            prompt = place_prompt(self._model, prompt)
            self._prompts.put(key, prompt)
        if prompt.features is not None:
            kept = prompt.features
            return replace(prompt, features=self._on_device.get(key, lambda: kept.to(self._device)))
        if not prompt.pixels:
            return prompt
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.vision_frozen):
            features = image_features(self._model, prompt.pixels)
        if self.vision_frozen:
            self._prompts.put(key, prompt.keeping(features))
        return replace(prompt, features=features)
