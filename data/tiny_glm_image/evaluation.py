"""Measures a saved tiny GLM-Image on held-out captions, through the same policy that training by rewards uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from data.shapes import BACKGROUNDS, COLORS, IMAGE_PIXELS, POSITIONS, SPRITES, Scene, draw
from grpo_core.policies.glm_image.policy import GlmImagePolicy, GlmImageSettings, TrainingChoice
from grpo_core.rewards.pictures import to_tensor
from grpo_core.rewards.psnr import peak_signal_to_noise_ratio
from grpo_core.rewards.ssim import structural_similarity
from grpo_core.seeds import derive_seed


@dataclass(frozen=True)
class TinyModelReport:
    """What a tiny GLM-Image draws for captions, as means over pictures.

    Attributes:
        temperature: of the token distribution.
        pictures: number of pictures measured.
        color, background: share of pictures that agree with the caption, read off by :func:`read_scene`.
        shape, position: likewise.
        ssim: to the caption's drawing, raw in [-1, 1].
        psnr: to the caption's drawing, dB.
        ssim_group_std: Bessel-corrected standard deviation of SSIM among pictures of one caption: what a reward can
            tell apart.
    """

    temperature: float
    pictures: int
    color: float
    shape: float
    position: float
    background: float
    ssim: float
    psnr: float
    ssim_group_std: float


def sample_pictures(
    folder: Path,
    prompts: Sequence[str],
    *,
    group_size: int,
    temperature: float,
    seed: int,
    num_inference_steps: int = 4,
    guidance_scale: float = 1.0,
) -> list[Image.Image]:
    """Draws `group_size` pictures of each prompt, siblings side by side, with seeds derived from `seed`."""
    settings = GlmImageSettings(
        height=IMAGE_PIXELS,
        width=IMAGE_PIXELS,
        temperature=temperature,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
    )
    choice = TrainingChoice(lora=None)
    policy = GlmImagePolicy.load(str(folder), settings, choice, dtype=torch.float32, device=torch.device("cpu"))
    seeds = [derive_seed(seed, "tokens", row) for row in range(len(prompts) * group_size)]
    noise = [derive_seed(seed, "noise", row // group_size) for row in range(len(seeds))]
    return policy.render(policy.sample(prompts, group_size=group_size, seeds=seeds).tokens, noise_seeds=noise)


def evaluate_tiny_model(
    folder: Path, scenes: Sequence[Scene], *, temperature: float, group_size: int = 4, seed: int = 0
) -> TinyModelReport:
    """Draws and measures `group_size` pictures of each scene's caption.

    Args:
        folder: a saved pipeline.
        scenes: usually the held-out ones of :func:`data.shapes.split_scenes`.
        temperature: of the token distribution.
        group_size: pictures a caption, at least two.
        seed: of tokens and decoder noise.
    """
    captions = [scene.caption for scene in scenes]
    images = sample_pictures(folder, captions, group_size=group_size, temperature=temperature, seed=seed)
    wanted = [scene for scene in scenes for _ in range(group_size)]
    found = [read_scene(image) for image in images]
    pictures, targets = _batch(images), _batch([draw(scene) for scene in wanted])
    ssim = structural_similarity(pictures, targets)
    return TinyModelReport(
        temperature=temperature,
        pictures=len(images),
        color=_share([scene.color for scene in found], [scene.color for scene in wanted]),
        shape=_share([scene.shape for scene in found], [scene.shape for scene in wanted]),
        position=_share([scene.position for scene in found], [scene.position for scene in wanted]),
        background=_share([scene.background for scene in found], [scene.background for scene in wanted]),
        ssim=ssim.mean().item(),
        psnr=peak_signal_to_noise_ratio(pictures, targets).mean().item(),
        ssim_group_std=ssim.view(-1, group_size).std(1).mean().item(),
    )


def read_scene(image: Image.Image) -> Scene:
    """Reads a picture back as a scene.

    Each pixel votes for the nearest of all colours: the sprite colour and the background with most votes are taken.
    Shape and position are those whose drawing in these two colours has the smallest mean squared difference.
    """
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    names = [*COLORS, *BACKGROUNDS]
    palette = np.array([*COLORS.values(), *BACKGROUNDS.values()], dtype=np.float32)
    nearest = np.square(pixels[:, :, None] - palette).sum(-1).argmin(-1)
    votes = np.bincount(nearest.ravel(), minlength=len(names))
    color = names[int(votes[: len(COLORS)].argmax())]
    background = names[len(COLORS) + int(votes[len(COLORS) :].argmax())]
    candidates = [Scene(color, shape, position, background) for shape in SPRITES for position in POSITIONS]
    return min(candidates, key=lambda scene: _squared_difference(pixels, draw(scene)))


def _squared_difference(pixels: NDArray[np.float32], drawing: Image.Image) -> float:
    return float(np.square(pixels - np.asarray(drawing, dtype=np.float32)).mean())


def _batch(images: Sequence[Image.Image]) -> Tensor:
    return torch.cat([to_tensor(image) for image in images])


def _share(found: Sequence[str], wanted: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)
