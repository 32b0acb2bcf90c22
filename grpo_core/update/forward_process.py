"""Images with noise added again, at noise levels of their own denoising schedule."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.image_size import ImageSize
from grpo_core.losses.nft import NoisedImages
from grpo_core.policies.protocol import VelocityComponent
from grpo_core.records import DenoisingBatch, TrainingRows
from grpo_core.seeds import derive_seed, make_generator


@dataclass(frozen=True, order=True)
class Noising:
    """One image at one noise level; ordered so that neighbours can share a call of the pipeline.

    Attributes:
        size: of the image.
        prompt: of the image.
        step: index of the denoising step that starts at this level.
        row: of the image among the rows of the update.
    """

    size: ImageSize
    prompt: str
    step: int
    row: int


class ForwardProcess:
    """The images of an update, and noise for them from a seed.

    The noise of an image depends on the seed, the epoch, its name and the level, not on the rows beside it.
    """

    def __init__(self, component: VelocityComponent, rows: TrainingRows, timesteps_per_image: int | None, seed: int):
        """Read the noise levels of every size.

        Args:
            component: whose pipeline made the images.
            rows: finished latents, one state per row.
            timesteps_per_image: levels that an image is trained at in an epoch; None: all.
            seed: of levels and noise.

        Raises:
            ValueError: rows of noisy steps, or fewer levels than an image should be trained at.
        """
        actions = rows.actions
        if not isinstance(actions, DenoisingBatch) or any(len(states) != 1 for states in actions.states):
            raise ValueError("it learns from finished images alone; sample them with rollout.sde_window_size 0")
        self.rows, self.images, self.seed = rows, actions, seed
        self.sigmas: Mapping[ImageSize, Float[Tensor, " steps"]] = {
            size: component.sigmas(actions.select([actions.sizes.index(size)])) for size in dict.fromkeys(actions.sizes)
        }
        levels = min(map(len, self.sigmas.values()))
        self.levels = levels if timesteps_per_image is None else timesteps_per_image
        if self.levels > levels:
            raise ValueError(f"images were denoised in {levels} steps, so there are no {self.levels} noise levels")

    def microbatches(self, indices: Sequence[int], epoch: int, size: int) -> list[list[Noising]]:
        """Return every image with each of its levels, in microbatches of one image size.

        Args:
            indices: rows of a minibatch.
            epoch: from 0; each has its own levels, and its own noise.
            size: of a microbatch.
        """
        noisings = sorted(each for row in indices for each in self._of_row(row, epoch))
        alike = (list(group) for _, group in groupby(noisings, lambda noising: noising.size))
        return [group[start : start + size] for group in alike for start in range(0, len(group), size)]

    def _of_row(self, row: int, epoch: int) -> Iterator[Noising]:
        """Yield an image at its levels, the same for all images of a prompt: these are compared with each other."""
        size, prompt = self.images.sizes[row], self.images.prompts[row]
        generator = make_generator(derive_seed(self.seed, "timesteps", epoch, prompt))
        drawn = torch.randperm(len(self.sigmas[size]), generator=generator)[: self.levels]
        yield from (Noising(size, prompt, step, row) for step in drawn.tolist())

    def noised(self, part: Sequence[Noising], epoch: int) -> tuple[DenoisingBatch, NoisedImages]:
        """Add noise to images of one size.

        Returns:
            What the component computes velocities of, and the same for the loss.
        """
        rows = [each.row for each in part]
        chosen = self.images.select(rows)
        stored = torch.stack([states[0] for states in chosen.states])
        images = stored.to(torch.promote_types(stored.dtype, torch.float32))
        sigmas = self.sigmas[part[0].size][[each.step for each in part]].to(images)
        noise = torch.stack([self._noise(each, epoch, images.shape[1:]) for each in part]).to(images)
        share = sigmas.view(-1, *(1,) * (images.ndim - 1))
        # Latents in bf16 belong to a pipeline that works in it; those in fp16 to one in fp32.
        working = images.dtype if stored.dtype == torch.float16 else stored.dtype
        noised = ((1 - share) * images + share * noise).to(working)
        actions = replace(chosen, states=tuple(noised.unsqueeze(1)), first_steps=tuple(each.step for each in part))
        return actions, NoisedImages(images, noised.to(images), sigmas, self.rows.advantages[rows].to(images))

    def _noise(self, noising: Noising, epoch: int, shape: torch.Size) -> Tensor:
        name = self.rows.sample_ids[noising.row]
        return torch.randn(shape, generator=make_generator(derive_seed(self.seed, "noise", epoch, name, noising.step)))
