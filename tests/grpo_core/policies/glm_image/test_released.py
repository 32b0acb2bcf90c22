import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GlmImageProcessor

from grpo_core.errors import InputError
from grpo_core.policies.estimate import count_parameters
from grpo_core.policies.glm_image.architecture import Components, build_on_meta, released_configs
from grpo_core.policies.glm_image.policy import FROZEN_PARTS, LANGUAGE_MODEL_LINEARS
from grpo_core.policies.glm_image.settings import token_grids
from grpo_core.policies.trained import LoraModel, LoraSettings

# (large, preview) tokens of square images, from the model's documentation.
SQUARE_TOKENS = {256: (64, 256), 512: (256, 256), 1024: (1024, 256), 2048: (4096, 256)}
RELEASED_UNIT = 32


@pytest.fixture(scope="module")
def released() -> Components:
    return build_on_meta(released_configs())


def test_parameters_are_those_of_the_release(released: Components) -> None:
    assert count_parameters(released.autoregressive) == pytest.approx(10.1e9, rel=0.01)
    assert count_parameters(released.decoder) == pytest.approx(6.93e9, rel=0.01)


def test_nothing_was_allocated(released: Components) -> None:
    parts = (released.autoregressive, released.decoder, released.vae, released.text_encoder)
    assert {parameter.device.type for part in parts for parameter in part.parameters()} == {"meta"}


def test_language_model_by_hand(released: Components) -> None:
    h, m, vocabulary, columns = 4096, 13696, 168064, 16512
    key_value = 2 * 128
    attention = h * h + h + 2 * (h * key_value + key_value) + h * h
    layer = attention + h * 2 * m + m * h + 4 * h
    expected = vocabulary * h + 40 * layer + h + columns * h
    trained = [p for n, p in released.autoregressive.named_parameters() if not n.startswith(FROZEN_PARTS)]
    assert sum(p.numel() for p in trained) == expected


def test_adapters_are_on_every_linear_layer_of_the_language_model_and_nowhere_else() -> None:
    model = build_on_meta(released_configs()).autoregressive
    settings = LoraSettings(rank=32, alpha=64.0, targets=LANGUAGE_MODEL_LINEARS)
    with torch.device("meta"):
        adapters = LoraModel(model, settings, base_name="released", seed=0).trainable_parameters()
    targets = {name.split(".lora_")[0] for name in adapters}
    assert len(targets) == 40 * 6
    assert not [name for name in targets if "visual" in name or "vqmodel" in name]
    count = sum(parameter.numel() for parameter in adapters.values())
    assert count == pytest.approx(95e6, rel=0.01)


@pytest.mark.parametrize(("side", "counts"), SQUARE_TOKENS.items())
def test_tokens_of_square_images(side: int, counts: tuple[int, int]) -> None:
    grids = token_grids(side, side, RELEASED_UNIT)
    assert (grids.large.tokens, grids.preview.tokens) == counts


@given(rows=st.integers(1, 96), columns=st.integers(1, 96))
def test_grids_are_those_of_the_stock_processor(rows: int, columns: int) -> None:
    height, width = 32 * rows, 32 * columns
    expected = GlmImageProcessor._get_target_shape(None, height, width)
    if expected[2] * expected[3] == 0:
        with pytest.raises(InputError, match="aspect ratio"):
            token_grids(height, width, RELEASED_UNIT)
        return
    grids = token_grids(height, width, RELEASED_UNIT)
    assert (grids.large.rows, grids.large.columns, grids.preview.rows, grids.preview.columns) == expected


@pytest.mark.parametrize(("height", "width"), [(1152, 768), (768, 1152), (1024, 512), (2048, 1024), (672, 992)])
def test_grids_of_common_aspect_ratios(height: int, width: int) -> None:
    grids = token_grids(height, width, RELEASED_UNIT)
    expected = GlmImageProcessor._get_target_shape(None, height, width)
    assert (grids.large.rows, grids.large.columns, grids.preview.rows, grids.preview.columns) == expected
