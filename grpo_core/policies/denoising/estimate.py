"""The memory of a denoising model's passes and the size of its stored states; no stage of a run computes it.

Activations are counted in values per position of a row, block and unit of hidden width. The count was taken on SD3's,
FLUX's, Qwen-Image's and Z-Image's blocks from the tensors that autograd keeps: 69 to 131 bytes in fp32, 42 to 96 in 16
bits, where norms and adapters keep copies in fp32.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from grpo_core.image_size import ImageSize
from grpo_core.policies.denoising.images import PIXELS_AT_ONCE
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.policies.estimate import MemoryPart

_KEPT_BY_BLOCK = {4: 92, 2: 70}
"""Bytes that a block keeps for its backward pass, for each position and unit of hidden width, by bytes per value."""

_ATTENTION = re.compile(r"(.+?\.\d+)\.\w*att\w*\.")

_MADE_BY_BLOCK = 16
"""Values that a block's forward pass has at once, for each position and unit of hidden width."""

STATE_BYTES = 2
"""States are stored in 16 bits."""


def hidden_width(config: Mapping[str, Any]) -> int:
    """Return the width of a transformer's positions, by the names that models of diffusers give it."""
    for name in ("hidden_size", "dim"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def count_blocks(transformer: nn.Module) -> int:
    """Count the blocks: the modules of a list that have attention."""
    found = (_ATTENTION.match(f"{name}.") for name, _ in transformer.named_modules())
    return len({match[1] for match in found if match is not None})


@dataclass(frozen=True)
class PassEstimate:
    """The sizes of a denoising model's passes, which decide their memory.

    Attributes:
        width: hidden width of a position.
        positions: of one row: patches of the image and ids of the prompt.
        passes: of the model for one row and step; 2 with classifier-free guidance.
        value_bytes: bytes of an activation.
    """

    width: int
    positions: int
    passes: int
    value_bytes: int

    def backward_parts(
        self, settings: DenoisingSettings, blocks: int, rows: int, *, checkpointed: bool
    ) -> list[MemoryPart]:
        """Return what a microbatch keeps for its backward pass, which goes through every noisy step at once.

        Args:
            blocks: of the model.
            rows: of a microbatch.
            checkpointed: each block keeps its input alone and is computed again, one at a time (arXiv:1604.06174).
        """
        # Without noisy steps a microbatch has rows at one noise level each (DiffusionNFT).
        steps = max(1, settings.sde_window_size)
        kept_each = _KEPT_BY_BLOCK[self.value_bytes]
        scored = rows * self.passes * self.positions * self.width
        kept = scored * steps * blocks * (self.value_bytes if checkpointed else kept_each)
        which = "each block's input" if checkpointed else "every block's"
        formula = f"{rows} rows x {steps} steps x {self.passes} passes of the model x {self.positions} positions: "
        at_work = scored * (_MADE_BY_BLOCK * self.value_bytes + (kept_each if checkpointed else 0))
        return [
            MemoryPart("activations", "backward", kept, formula + which),
            MemoryPart("backward pass at work", "backward", at_work, "one block"),
        ]

    def decoding_part(self, size: ImageSize, rows: int, vae_width: int) -> MemoryPart:
        """Return the largest tensors while images are made: a block for all rows, or the autoencoder's.

        The autoencoder has about 4 tensors of [vae_width, height, width] for an image, or for all that it decodes at
        once.

        Args:
            rows: images that are denoised at once.
            vae_width: channels of the autoencoder's block before the last, at full resolution.
        """
        denoising = _MADE_BY_BLOCK * rows * self.passes * self.positions * self.width * self.value_bytes
        decoded = max(size.pixels, min(rows * size.pixels, PIXELS_AT_ONCE))
        autoencoder = 4 * vae_width * decoded * self.value_bytes
        what = f"{size}: a block for {rows} images, or the autoencoder"
        return MemoryPart("decoding", "decoding", max(denoising, autoencoder), what)


def state_bytes(settings: DenoisingSettings, latent_values: int) -> int:
    """Return the bytes on disk of one image's states: the latents before and after each noisy step.

    Args:
        latent_values: numbers in the latents of one image.
    """
    return (settings.sde_window_size + 1) * latent_values * STATE_BYTES
