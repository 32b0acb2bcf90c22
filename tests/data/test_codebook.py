"""Tokens stand for exactly the colours that were drawn."""

import numpy as np
import torch

from data.codebook import CODEBOOK_SIZE, PURE_CODES, codebook, decode_tokens, encode_cells
from data.shapes import BACKGROUNDS, COLORS, Scene, all_scenes, draw_cells

RED, WHITE = list(COLORS).index("red"), len(COLORS) + list(BACKGROUNDS).index("white")


def test_square_in_a_corner_by_hand() -> None:
    tokens = encode_cells(draw_cells(Scene("red", "square", "top left", "white"))[None])[0]
    preview, large = tokens[:16].view(4, 4), tokens[16:].view(8, 8)
    expected_preview = torch.full((4, 4), WHITE)
    expected_preview[:2, :2] = RED
    expected_large = torch.full((8, 8), WHITE)
    expected_large[:4, :4] = RED
    assert torch.equal(preview, expected_preview)
    assert torch.equal(large, expected_large)


def test_preview_cell_under_a_cut_corner_is_three_quarters_the_color() -> None:
    tokens = encode_cells(draw_cells(Scene("blue", "circle", "top left", "black"))[None])[0]
    expected = 0.75 * np.array(COLORS["blue"]) + 0.25 * np.array(BACKGROUNDS["black"])
    np.testing.assert_allclose(codebook()[tokens[0]], expected, rtol=1e-6)


def test_all_images_survive_encoding_and_decoding_exactly() -> None:
    cells = np.stack([draw_cells(scene) for scene in all_scenes()])
    tokens = encode_cells(cells)
    assert int(tokens[:, 16:].max()) == PURE_CODES - 1
    decoded = (decode_tokens(tokens[:, 16:]).permute(0, 2, 3, 1) + 1) * 127.5
    np.testing.assert_allclose(decoded.numpy(), cells, atol=1e-3)


def test_every_code_is_a_color_of_its_own_and_is_used() -> None:
    assert len(np.unique(codebook(), axis=0)) == CODEBOOK_SIZE
    cells = np.stack([draw_cells(scene) for scene in all_scenes()])
    assert encode_cells(cells).unique().tolist() == list(range(CODEBOOK_SIZE))
