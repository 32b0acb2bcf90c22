"""The sampling settings of a text-to-image pipeline."""

from dataclasses import dataclass

from pydantic import PositiveInt

from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.sampling_settings import ImageSettings


@dataclass(frozen=True, kw_only=True)
class DiffusersSettings(ImageSettings, DenoisingSettings):
    """How images are sampled.

    Attributes:
        max_sequence_length: longest prompt in ids of the text encoder; None: the pipeline's own.
        negative_prompt: of the unconditional pass, with guidance; None: the pipeline's own.
    """

    max_sequence_length: PositiveInt | None = None
    negative_prompt: str | None = None
