"""Grids of an image size, and prompts as the token model reads them, against stock classes."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import GlmImagePipeline
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import GlmImageProcessor
from transformers.models.glm_image.image_processing_pil_glm_image import smart_resize

from grpo_core.errors import InputError
from grpo_core.policies.encoded_prompts import EncodedPrompts
from grpo_core.policies.glm_image.processor import UnitProcessor
from grpo_core.policies.glm_image.prompts import encode_prompts
from grpo_core.policies.glm_image.settings import (
    Grid,
    SourceLimits,
    TokenGrids,
    nearest_size,
    preview_grid,
    token_grids,
)
from grpo_core.rollouts.streams import MAX_PIXELS, ImageSize
from tests.tiny_policies import PROMPTS

SIDES = st.integers(1, 64)


def test_a_image_of_the_tiny_model_by_hand() -> None:
    """32 x 64 in units of 8: 4 x 8. Aspect 1/2, so about 4 sqrt(1/2) = 2.8 by 4 sqrt(2) = 5.7, rounded down."""
    assert token_grids(ImageSize(64, 32), 8) == TokenGrids(preview=Grid(2, 5), large=Grid(4, 8))
    assert token_grids(ImageSize(32, 64), 8) == TokenGrids(preview=Grid(5, 2), large=Grid(8, 4))


@given(SIDES, SIDES)
def test_both_grids_are_those_of_the_stock_processor(rows: int, columns: int) -> None:
    stock = GlmImageProcessor._get_target_shape(None, 32 * rows, 32 * columns)
    large = Grid(rows, columns)
    for unit in (8, 32):
        preview = preview_grid(large, unit)
        ours = UnitProcessor._get_target_shape(SimpleNamespace(unit=unit), unit * rows, unit * columns)
        assert (large.rows, large.columns, preview.rows, preview.columns) == ours
    assert ours == stock


@pytest.mark.parametrize(
    ("size", "unit", "nearest"),
    [
        ((64, 60), 8, "64x64"),
        ((33, 64), 8, "32x64"),
        ((64, 3), 8, "64x8"),
        ((500, 700), 32, "512x704"),
        # The preview of a longer image would have no cell.
        ((8 * 40, 8), 8, "128x8"),
        # No image of more pixels could be read again.
        ((10_033, 10_033), 32, "8192x8192"),
        ((16_384, 8192), 32, "11584x5792"),
    ],
)
def test_a_size_that_cannot_be_generated_is_refused_with_the_nearest(
    size: tuple[int, int], unit: int, nearest: str
) -> None:
    with pytest.raises(InputError, match=f" {nearest}") as refused:
        token_grids(ImageSize(*size), unit)
    assert refused.value.place == "rollout.width and height"


@given(st.integers(-9, 40_000), st.integers(-9, 40_000), st.sampled_from([8, 32]))
def test_the_nearest_size_can_be_generated(width: int, height: int, unit: int) -> None:
    nearest = nearest_size(ImageSize(width, height), unit)
    assert nearest_size(nearest, unit) == nearest
    assert token_grids(nearest, unit).preview.tokens
    assert nearest.pixels <= MAX_PIXELS
    assert not any(side % unit for side in nearest)


# The released model's and the tiny one's.
LIMITS = (SourceLimits(512, 2048, 32), SourceLimits(64, 256, 8))


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(LIMITS))
def test_the_stock_image_processor_only_halves_what_a_source_is_resized_to(
    width: int, height: int, limits: SourceLimits
) -> None:
    assume(max(width, height) <= 4 * min(width, height))
    found = limits.nearest(ImageSize(width, height))
    smallest, largest = limits.smallest**2, limits.largest**2
    resized = smart_resize(found.height, found.width, limits.unit // 2, min_pixels=smallest, max_pixels=largest)
    assert resized == (found.height // 2, found.width // 2)
    assert not any(side % limits.unit for side in found)
    assert limits.nearest(found) == found


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((512, 512), "512x512"),
        ((300, 300), "512x512"),
        ((300, 600), "512x1024"),
        ((1000, 750), "992x736"),
        ((3000, 1500), "2048x1024"),
        # Scaled up for its short side, at most until the long side is at its limit.
        ((2048, 512), "2048x512"),
        ((4, 1), "2048x512"),
    ],
)
def test_sources_of_the_released_model_by_hand(size: tuple[int, int], resized: str) -> None:
    assert str(LIMITS[0].nearest(ImageSize(*size))) == resized


def test_a_long_source_is_refused() -> None:
    with pytest.raises(InputError, match="at most 4 short sides"):
        LIMITS[0].nearest(ImageSize(512, 2049))


STATE = ("rope_deltas", "_cached_decode_position_ids", "_prefill_len")


def encoded(pipeline: GlmImagePipeline, *prompts: str) -> EncodedPrompts:
    return encode_prompts(pipeline.vision_language_encoder.model, pipeline.processor, prompts, ImageSize(64, 32))


def test_ids_end_with_the_tags_of_both_grids(shipped_pipeline: GlmImagePipeline) -> None:
    text = shipped_pipeline.processor.tokenizer.decode(encoded(shipped_pipeline, PROMPTS[0]).input_ids[0])
    bos = shipped_pipeline.processor.bos_token
    assert text == f"a red circle<sop>4 8<eop><sop>2 5<eop>{bos}"


def test_positions_by_hand(shipped_pipeline: GlmImagePipeline) -> None:
    """Text counts up on all three axes; a grid has its start in time and its cell in height and width."""
    prompt = encoded(shipped_pipeline, PROMPTS[0])
    length, positions = prompt.length, torch.cat([prompt.position_ids, prompt.positions(2 * 5 + 4 * 8 + 1)], -1)[:, 0]
    assert positions.shape[1] == length + 2 * 5 + 4 * 8 + 1
    assert torch.equal(positions[:, :length], torch.arange(length).expand(3, -1))
    preview = [(length, length + row, length + column) for row in range(2) for column in range(5)]
    start = length + 5
    large = [(start, start + row, start + column) for row in range(4) for column in range(8)]
    assert positions[:, length:].T.tolist() == [list(place) for place in [*preview, *large, (start + 8,) * 3]]


def test_left_padding_moves_no_position(shipped_pipeline: GlmImagePipeline) -> None:
    together = encoded(shipped_pipeline, *PROMPTS)
    assert len(set(together.attention_mask.sum(-1).tolist())) > 1, "prompts of different lengths"
    for row, prompt in enumerate(PROMPTS):
        alone = encoded(shipped_pipeline, prompt)
        pad = together.length - alone.length
        assert together.attention_mask[row].tolist() == [0] * pad + [1] * alone.length
        assert torch.equal(together.input_ids[row, pad:], alone.input_ids[0])
        assert torch.equal(together.position_ids[:, row, pad:], alone.position_ids[:, 0])
        assert torch.equal(together.positions(43)[:, row], alone.positions(43)[:, 0])


def test_nothing_is_left_on_the_model(shipped_pipeline: GlmImagePipeline) -> None:
    model = shipped_pipeline.vision_language_encoder.model
    encoded(shipped_pipeline, *PROMPTS[:2])
    assert [getattr(model, name) for name in STATE] == [None, None, None]


@pytest.mark.parametrize(
    "tag", ["<sop>", "<eop>", "<|image|>", "<|endoftext|>", "<|dit_token_3|>", "<|dit_token_73|>", "<|dit_token_74|>"]
)
def test_a_prompt_with_a_reserved_tag_is_refused(shipped_pipeline: GlmImagePipeline, tag: str) -> None:
    for prompt in (tag, f"a red {tag} circle", f"a red circle{tag}\n"):
        with pytest.raises(InputError) as caught:
            encoded(shipped_pipeline, "a blue square", prompt)
        assert (caught.value.place, caught.value.value) == ("prompt", prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        "a < b > c",
        "<html>",
        "{{ 7 * 7 }} {% raw %}",
        "一只猫 🙂",
        "e\u0301 \u200f\u05d0",
        "a\x00b",
        " two  spaces ",
        "",
    ],
)
def test_any_other_text_is_read_as_it_stands(shipped_pipeline: GlmImagePipeline, prompt: str) -> None:
    tokenizer = shipped_pipeline.processor.tokenizer
    ids = encoded(shipped_pipeline, prompt).input_ids[0]
    tags = encoded(shipped_pipeline, "").length
    assert tokenizer.decode(ids[: len(ids) - tags]) == prompt
