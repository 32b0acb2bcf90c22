"""Grids of an image size, against the stock processor and the released model's numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GlmImageProcessor

from grpo_core.errors import InputError
from grpo_core.policies.glm_image.settings import Grid, TokenGrids, preview_grid, token_grids

SIDES = st.integers(1, 64)


def test_a_image_of_the_tiny_model_by_hand() -> None:
    """32 x 64 in units of 8: 4 x 8. Aspect 1/2, so about 4 sqrt(1/2) = 2.8 by 4 sqrt(2) = 5.7, rounded down."""
    assert token_grids(32, 64, 8) == TokenGrids(preview=Grid(2, 5), large=Grid(4, 8))
    assert token_grids(64, 32, 8) == TokenGrids(preview=Grid(5, 2), large=Grid(8, 4))


@given(SIDES, SIDES)
def test_both_grids_are_those_of_the_stock_processor(rows: int, columns: int) -> None:
    expected = GlmImageProcessor._get_target_shape(None, 32 * rows, 32 * columns)
    large = Grid(rows, columns)
    preview = preview_grid(large, 32)
    assert (large.rows, large.columns, preview.rows, preview.columns) == expected


@pytest.mark.parametrize(
    ("height", "width", "side", "nearest"),
    [(60, 64, "height", 64), (64, 33, "width", 32), (0, 64, "height", 8), (64, -8, "width", 8), (3, 64, "height", 8)],
)
def test_a_side_that_is_no_multiple_is_refused_with_the_nearest(
    height: int, width: int, side: str, nearest: int
) -> None:
    with pytest.raises(InputError, match=f"units of 8 pixels; the nearest is {nearest}") as caught:
        token_grids(height, width, 8)
    assert caught.value.place == f"rollout.{side}"


def test_a_image_too_thin_for_a_preview_is_refused() -> None:
    with pytest.raises(InputError, match="less extreme aspect ratio"):
        token_grids(8, 8 * 40, 8)
