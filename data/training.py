"""The supervised training of the tiny image models, their autoencoder, and what their images show."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from data.shapes import (
    BACKGROUNDS,
    CELL_PIXELS,
    COLORS,
    GRID,
    POSITIONS,
    SPRITES,
    Scene,
    draw,
    draw_cells,
    sprite_mask,
    sprite_origin,
)
from grpo_core.errors import NonFiniteError
from grpo_core.rewards.tensors import (
    coefficient_of_determination,
    peak_signal_to_noise_ratio,
    structural_similarity,
    to_tensor,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_CHANNELS = 8
# Two constant channels of this size pin the group's standard deviation, for any image.
_PIN = 1000.0


def build_cell_autoencoder(*, levels: int, sample_size: int, **config: object) -> AutoencoderKL:
    """Build an autoencoder of three latent channels that keeps images whose squares are of one colour each.

    A pixel a passes the nonlinearity as the pair (a, -a), because silu(a) - silu(-a) = a; residual branches add zero.

    Args:
        levels: of resolution; a latent covers a square of 2 ** (levels - 1) pixels, so 1 gives the identity.
        sample_size: side of the images in pixels, for the configuration.
        config: of AutoencoderKL, such as its scaling factor.

    Returns:
        The autoencoder in evaluation mode. Encoding takes the mean of each square, decoding paints it flat, both within
        1e-4 of pixels in [-1, 1].
    """
    vae = AutoencoderKL(
        block_out_channels=(_CHANNELS,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        latent_channels=3,
        norm_num_groups=1,
        layers_per_block=1,
        sample_size=sample_size,
        mid_block_add_attention=False,
        **config,
    )
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if "resnets" in name and "conv2" in name:
                parameter.zero_()
        for name, module in vae.named_modules():
            if name.endswith(("downsamplers.0.conv", "upsamplers.0.conv")):
                _set_resampling(module, averages="downsamplers" in name)
        for half in (vae.encoder, vae.decoder):
            _set_centres(half.conv_in, [(2 * c + s, c, 1.0 - 2 * s) for c in range(3) for s in (0, 1)])
            half.conv_in.bias[6:] = torch.tensor([_PIN, -_PIN])
            half.conv_norm_out.weight.fill_(_PIN * (2 / _CHANNELS) ** 0.5)
            half.conv_norm_out.bias.zero_()
            _set_centres(half.conv_out, [(c, 2 * c + s, 1.0 - 2 * s) for c in range(3) for s in (0, 1)])
        # Log-variance of the posterior: its samples are its mode.
        vae.encoder.conv_out.bias[3:] = -30.0
        for convolution in (vae.quant_conv, vae.post_quant_conv):
            convolution.bias.zero_()
            convolution.weight.copy_(torch.eye(convolution.out_channels)[:, :, None, None])
    return vae.eval()


def _set_resampling(convolution: nn.Conv2d, *, averages: bool) -> None:
    """Keep the channels apart; the encoder's strided convolution averages the four pixels of a square of two by two."""
    assert convolution.bias is not None
    convolution.weight.zero_()
    convolution.bias.zero_()
    kept = torch.eye(convolution.out_channels)
    if averages:
        # The encoder pads on the right and at the bottom alone, so that the first two taps of an axis are the square.
        convolution.weight[:, :, :2, :2] = kept[:, :, None, None] / 4
    else:
        convolution.weight[:, :, 1, 1] = kept


def _set_centres(convolution: nn.Conv2d, entries: Sequence[tuple[int, int, float]]) -> None:
    """Make a convolution zero but for the centres of these (output, input) channels."""
    assert convolution.bias is not None
    convolution.weight.zero_()
    convolution.bias.zero_()
    middle = convolution.kernel_size[0] // 2
    for output, source, value in entries:
        convolution.weight[output, source, middle, middle] = value


# Called after each step with (steps done, total steps, loss of this step).
ProgressCallback = Callable[[int, int, float], None]

_WARMUP = 0.05
_FLOOR = 0.02
_MAX_GRAD_NORM = 1.0


def learning_rate_factor(step: int, steps: int) -> float:
    """Return a linear warm-up over the first twentieth, then a cosine down to 1/50 of the peak; `step` is from 0."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class SupervisedOptimizer:
    """AdamW with gradient clipping and the schedule of :func:`learning_rate_factor`."""

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float, steps: int) -> None:
        self._parameters = list(parameters)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: learning_rate_factor(step, steps)
        )

    def step(self, loss: Tensor) -> float:
        """Make one step on a scalar loss and return the loss.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        value = loss.item()
        if not math.isfinite(value):
            raise NonFiniteError("supervised loss", [], "Lower the recipe's learning rate.")
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, _MAX_GRAD_NORM)
        self._optimizer.step()
        self._schedule.step()
        return value


def train(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    steps: int,
    loss_of_next_batch: Callable[[], Tensor],
    on_step: ProgressCallback | None,
) -> float:
    """Train in place and return the mean loss over the last twentieth of the steps.

    Raises:
        NonFiniteError: the loss is NaN or infinite.
    """
    optimizer = SupervisedOptimizer(parameters, learning_rate, steps)
    losses = []
    model.train()
    for step in range(steps):
        losses.append(optimizer.step(loss_of_next_batch()))
        if on_step is not None:
            on_step(step + 1, steps, losses[-1])
    model.eval()
    tail = losses[-max(1, len(losses) // 20) :]
    return sum(tail) / len(tail)


RECIPE_FILE = "recipe.json"


def write_recipe(
    folder: Path, recipe: "DataclassInstance", measured: Mapping[str, object], *, libraries: Sequence[str]
) -> None:
    """Write recipe.json into a saved model's folder: the recipe, library versions, and what was measured.

    Args:
        measured: plain JSON values by name, such as the fields of the training metrics and reports.
        libraries: those whose versions affect the result.
    """
    content = {
        "recipe": asdict(recipe),
        "versions": {name: version(name) for name in libraries},
        "measured": dict(measured),
    }
    (folder / RECIPE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ImageQuality:
    """The quality of a tiny model's images, as means over images.

    Attributes:
        images: number of images measured.
        color, background: share of images that agree with the caption, found by :func:`read_scene`.
        shape, position: the same for shape and position.
        r2: share of the variance of the caption's drawing that the image explains, at least 0.
        ssim: to the caption's drawing, raw in [-1, 1].
        psnr: to the caption's drawing, dB.
        ssim_group_std: Bessel-corrected standard deviation of SSIM among images of one caption: what a reward can
            distinguish.
    """

    images: int
    color: float
    shape: float
    position: float
    background: float
    r2: float
    ssim: float
    psnr: float
    ssim_group_std: float


def measure_images(images: Sequence[Image.Image], wanted: Sequence[Scene], *, group_size: int) -> ImageQuality:
    """Measure images that were made from the captions of these scenes; those of one caption are side by side.

    Args:
        group_size: images of one caption, at least 2.
    """
    found = [read_scene(image) for image in images]
    pixels, targets = _batch(images), _batch([draw(scene) for scene in wanted])
    ssim = structural_similarity(pixels, targets)
    return ImageQuality(
        images=len(images),
        color=_share([scene.color for scene in found], [scene.color for scene in wanted]),
        shape=_share([scene.shape for scene in found], [scene.shape for scene in wanted]),
        position=_share([scene.position for scene in found], [scene.position for scene in wanted]),
        background=_share([scene.background for scene in found], [scene.background for scene in wanted]),
        r2=coefficient_of_determination(pixels, targets).clamp(0, 1).mean().item(),
        ssim=ssim.mean().item(),
        psnr=peak_signal_to_noise_ratio(pixels, targets).mean().item(),
        ssim_group_std=ssim.view(-1, group_size).std(1).mean().item(),
    )


def read_scene(image: Image.Image) -> Scene:
    """Recognise the scene that an image shows.

    Each pixel votes for the nearest of all colours: the sprite colour and the background with most votes win.
    The shape is the sprite that, in these two colours and anywhere on the canvas, has the smallest mean squared
    difference to the image; the position is the nearest to this sprite's cell, along both axes.
    """
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    names = [*COLORS, *BACKGROUNDS]
    palette = np.array([*COLORS.values(), *BACKGROUNDS.values()], dtype=np.float32)
    nearest = np.square(pixels[:, :, None] - palette).sum(-1).argmin(-1)
    votes = np.bincount(nearest.ravel(), minlength=len(names))
    color = names[int(votes[: len(COLORS)].argmax())]
    background = names[len(COLORS) + int(votes[len(COLORS) :].argmax())]
    shape, origin = _nearest_sprite(pixels, color, background)
    position = min(POSITIONS, key=lambda name: _cells_apart(sprite_origin(shape, name), origin))
    return Scene(color, shape, position, background)


def _nearest_sprite(pixels: NDArray[np.float32], color: str, background: str) -> tuple[str, tuple[int, int]]:
    # Compared with flat cells, the mean of a cell's pixels gives the same ranking as the pixels.
    cells = pixels.reshape(GRID, CELL_PIXELS, GRID, CELL_PIXELS, 3).mean(axis=(1, 3))
    differences: dict[tuple[str, tuple[int, int]], float] = {}
    for shape in SPRITES:
        scene = Scene(color, shape, "center", background)
        height, width = sprite_mask(shape).shape
        for origin in itertools.product(range(GRID - height + 1), range(GRID - width + 1)):
            differences[shape, origin] = float(np.square(cells - draw_cells(scene, origin)).sum())
    return min(differences, key=lambda placed: differences[placed])


def _cells_apart(first: tuple[int, int], second: tuple[int, int]) -> int:
    return abs(first[0] - second[0]) + abs(first[1] - second[1])


def _batch(images: Sequence[Image.Image]) -> Tensor:
    return torch.cat([to_tensor(image) for image in images])


def _share(found: Sequence[str], wanted: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)
