"""A pipeline that makes or edits images, behind the Policy protocol; each prompt is encoded once."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from grpo_core.errors import InputError
from grpo_core.policies.diffusers.component import DiffusersDenoising
from grpo_core.policies.diffusers.loading import (
    TRANSFORMER,
    load_pipeline,
    require_saved_pipeline,
    train_transformer,
)
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings, call_settings, refuse_size
from grpo_core.policies.pipeline_loading import initial_state_of, offloaded_parts
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.policies.trained.component import use_attention
from grpo_core.policies.trained.model import CPU
from grpo_core.policies.trained.offload import offload_parts
from grpo_core.policies.trained.quantization import refuse_unusable_weights
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.records import BrokenImage, GroupRequest, Output, RolloutGroup
from grpo_core.rollouts.streams import ImageSize, Stream


class DiffusersPolicy:
    """A pipeline that makes images from prompts, or from prompts with source images."""

    def __init__(self, denoising: DiffusersDenoising) -> None:
        self.denoising = denoising
        self.settings, self.offload = denoising.settings, denoising.offload

    @property
    def components(self) -> Mapping[Stream, PolicyComponent]:
        """The trained component by its stream."""
        return {"denoising": self.denoising}

    def sample_with(self, settings: DiffusersSettings) -> None:
        """Use these settings for sampling and scoring; InputError for a size or guidance the pipeline does not have."""
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
        offload: bool = False,
    ) -> "DiffusersPolicy":
        """Load by folder or hub name."""
        choice = choices["denoising"]
        saved, quantization = require_saved_pipeline(model), choice.quantization
        adapters = choice.lora is not None
        refuse_unusable_weights(model, saved.parts, quantization, device, trained=(TRANSFORMER,), adapters=adapters)
        offloaded = offloaded_parts(saved.parts, () if adapters else (TRANSFORMER,)) if offload else ()
        pipeline = load_pipeline(model, dtype=dtype, device=device, quantization=quantization, offloaded=offloaded)
        use_attention(pipeline.transformer, attn_implementation)
        initial_state = initial_state_of(model, saved.parts, TRANSFORMER, dtype)
        trained = train_transformer(pipeline.transformer, choice, model, initial_state=initial_state)
        mover = offload_parts(pipeline, offloaded, device)
        denoising = DiffusersDenoising(pipeline, saved, settings, trained, autocast=autocast, offload=mover)
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

    def sample_batches(self, batches: Sequence[Sequence[GroupRequest]]) -> Iterator[RolloutGroup]:
        """Sample one batch after the other; with offloaded parts the prompts of all are encoded before."""
        rows = ((each.prompt, each.sources, each.size or self.settings.size) for batch in batches for each in batch)
        self.denoising.encode_ahead(rows)
        return itertools.chain.from_iterable(map(self.sample, batches))


def _require_size(images: Sequence[Output], size: ImageSize) -> None:
    """Refuse images of another size than was requested: some pipelines round it, and say so only in a log."""
    for each in images:
        image = each.image if isinstance(each, BrokenImage) else each
        assert not isinstance(image, str)
        if image.size != tuple(size):
            made = ImageSize(*image.size)
            raise InputError("rollout.width and height", str(size), f"This model makes it {made}; set this size.")
