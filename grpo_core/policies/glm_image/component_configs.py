"""The configurations of the four models that make up a GLM-Image pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import GlmImageConfig, T5Config


@dataclass(frozen=True)
class ComponentConfigs:
    """What each network is built from.

    Attributes:
        autoregressive: the token model with its vision tower and quantizer.
        decoder: arguments of GlmImageTransformer2DModel.
        vae: arguments of AutoencoderKL.
        text_encoder: the glyph encoder.
    """

    autoregressive: GlmImageConfig
    decoder: Mapping[str, object]
    vae: Mapping[str, object]
    text_encoder: T5Config
