"""A text-to-image pipeline behind the Policy protocol; what its classes differ in is known only in this package."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from grpo_core.errors import InputError
from grpo_core.groups import GroupRequest, RolloutGroup
from grpo_core.image_size import ImageSize
from grpo_core.policies.denoising import DenoisingComponent
from grpo_core.policies.diffusers.guidance import call_settings
from grpo_core.policies.diffusers.loading import (
    load_pipeline,
    read_initial_state,
    require_saved_pipeline,
    train_transformer,
    use_attention,
)
from grpo_core.policies.diffusers.prompt_cache import PromptCache
from grpo_core.policies.diffusers.saved_pipeline import SavedPipeline, refuse_size
from grpo_core.policies.diffusers.settings import DiffusersSettings
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.policies.trained import TrainedModel, TrainingChoice
from grpo_core.records import BrokenImage, Output, TokenBatch
from grpo_core.streams import Stream

CPU = torch.device("cpu")


class DiffusersDenoising(DenoisingComponent):
    """The transformer of a pipeline, which makes all denoising steps."""

    settings: DiffusersSettings

    def __init__(
        self,
        pipeline: Any,
        saved: SavedPipeline,
        settings: DiffusersSettings,
        trained: TrainedModel,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Combine the parts; `DiffusersPolicy.load` is the usual way.

        Args:
            saved: what the pipeline's configuration files say.
        """
        super().__init__(pipeline, settings, trained, autocast=autocast)
        self.saved = saved
        self.prompts = PromptCache(pipeline)

    @property
    def one_prompt_per_call(self) -> bool:
        """Whether embeddings of several prompts would have to be padded, so that a row would depend on the others."""
        return not self.prompts.pads_to_one_length

    def call_arguments(self, prompts: Sequence[str], drafts: TokenBatch | None, size: ImageSize) -> Mapping[str, Any]:
        """Return the arguments of the pipeline's call for these rows."""
        given = call_settings(self.saved, self.settings)
        # Some pipelines want as many negative prompts as prompts.
        by_row = {name: [value] * len(prompts) for name, value in given.items() if isinstance(value, str)}
        return {**given, **by_row, "prompt": list(prompts), "height": size.height, "width": size.width}


class DiffusersPolicy:
    """A pipeline that makes images from prompts alone."""

    def __init__(self, denoising: DiffusersDenoising) -> None:
        """Wrap the component; `load` is the usual way."""
        self.denoising = denoising
        self.settings = denoising.settings

    @property
    def components(self) -> Mapping[Stream, PolicyComponent]:
        """The trained component by its stream."""
        return {"denoising": self.denoising}

    def sample_with(self, settings: DiffusersSettings) -> None:
        """Use these settings for sampling and scoring from this call on.

        Raises:
            InputError: a size or a guidance that the pipeline does not have.
        """
        refuse_size(self.denoising.saved, settings.size)
        call_settings(self.denoising.saved, settings)
        self.settings = self.denoising.settings = settings

    @classmethod
    def load(
        cls,
        model: str,
        settings: DiffusersSettings,
        choices: Mapping[Stream, TrainingChoice],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        autocast: torch.dtype | None = None,
        attn_implementation: str | None = None,
    ) -> "DiffusersPolicy":
        """Load by folder or hub name.

        Raises:
            InputError: no such model, settings that it cannot sample with, or adapter targets that match nothing.
        """
        pipeline = load_pipeline(model, dtype=dtype, device=device)
        use_attention(pipeline.transformer, attn_implementation)
        trained = train_transformer(
            pipeline.transformer, choices["denoising"], model, initial_state=lambda: read_initial_state(model, dtype)
        )
        denoising = DiffusersDenoising(pipeline, require_saved_pipeline(model), settings, trained, autocast=autocast)
        policy = cls(denoising)
        policy.sample_with(settings)
        return policy

    def sample(self, requests: Sequence[GroupRequest]) -> Iterator[RolloutGroup]:
        """Sample the images of all groups, `decode_batch_size` at once."""
        size = requests[0].size or self.settings.size
        groups = self.denoising.sample(requests, None, size=size, rows_per_call=self.settings.decode_batch_size)
        for request, group in zip(requests, groups, strict=True):
            _require_size(group.images, size)
            yield RolloutGroup(request, {} if group.sampled is None else {"denoising": group.sampled}, group.images)


def _require_size(images: Sequence[Output], size: ImageSize) -> None:
    """Refuse images of another size than was requested: some pipelines round it, and say so only in a log."""
    for each in images:
        image = each.image if isinstance(each, BrokenImage) else each
        assert not isinstance(image, str)
        if image.size != tuple(size):
            made = ImageSize(*image.size)
            raise InputError("rollout.width and height", str(size), f"This model makes it {made}; set this size.")
