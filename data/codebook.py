"""The image tokens of the tiny GLM-Image: each code is one flat colour.

The first codes are the colours of :mod:`data.shapes` and its backgrounds; the rest are the blends of a preview cell
of which a sprite covers a quarter, a half or three quarters.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.shapes import BACKGROUNDS, COLORS, GRID

PREVIEW_GRID = GRID // 2
_COVERAGES = (0.25, 0.5, 0.75)


def codebook() -> NDArray[np.float32]:
    """Return the colour of each code, float32 [codes, 3], RGB in 0..255."""
    colors = np.array(list(COLORS.values()), dtype=np.float32)
    backgrounds = np.array(list(BACKGROUNDS.values()), dtype=np.float32)
    blends = [
        coverage * color + (1 - coverage) * background
        for color in colors
        for background in backgrounds
        for coverage in _COVERAGES
    ]
    return np.concatenate([colors, backgrounds, np.stack(blends).astype(np.float32)])


CODEBOOK_SIZE = len(COLORS) + len(BACKGROUNDS) + len(COLORS) * len(BACKGROUNDS) * len(_COVERAGES)
# Codes below this one are the pure colours, the only ones in the large grid of a synthetic image.
PURE_CODES = len(COLORS) + len(BACKGROUNDS)


def _nearest_code(cells: NDArray[np.floating]) -> NDArray[np.int64]:
    distance = ((cells[..., None, :] - codebook()) ** 2).sum(-1)
    nearest: NDArray[np.int64] = distance.argmin(-1).astype(np.int64)
    return nearest


def encode_cells(cells: NDArray[np.uint8]) -> Tensor:
    """Encode synthetic images as image tokens in the order of generation: the preview grid, then the large grid.

    Args:
        cells: uint8 [images, 8, 8, 3], one colour per cell.

    Returns:
        int64 [images, 16 + 64]; a preview cell is the mean of the four cells it covers.
    """
    count = len(cells)
    large = cells.astype(np.float32)
    preview = large.reshape(count, PREVIEW_GRID, 2, PREVIEW_GRID, 2, 3).mean(axis=(2, 4))
    tokens = [_nearest_code(grid).reshape(count, -1) for grid in (preview, large)]
    return torch.from_numpy(np.concatenate(tokens, axis=1))


def decode_tokens(large_tokens: Tensor) -> Tensor:
    """Decode the tokens of the large grid to an image.

    Args:
        large_tokens: int64 [images, 64], each below :data:`CODEBOOK_SIZE`.

    Returns:
        float32 [images, 3, 8, 8], cell colours in [-1, 1].
    """
    colors = torch.from_numpy(codebook()) / 127.5 - 1
    return colors[large_tokens].view(-1, GRID, GRID, 3).permute(0, 3, 1, 2).contiguous()
