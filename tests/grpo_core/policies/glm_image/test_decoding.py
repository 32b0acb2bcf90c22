"""Images from stored tokens: the same seeds give the same image, in any company."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline
from PIL import Image
from torch import Tensor

from grpo_core.collect import collect_rollouts
from grpo_core.policies.glm_image.decoding import GlmImageDecoder, large_grid_ids
from grpo_core.policies.glm_image.settings import GlmImageSettings, Grid, TokenGrids, token_grids
from grpo_core.policies.trained.lora_and_full import FrozenModel
from grpo_core.rollouts.actions import TokenBatch, pad_to_longest
from grpo_core.rollouts.records import GroupRequest
from grpo_core.rollouts.streams import ImageSize
from grpo_core.settings import Truncation
from tests.tiny_policies import PROMPTS, build_policy, render

GRIDS = TokenGrids(preview=Grid(1, 2), large=Grid(2, 2))
TOKENS = torch.randint(73, (6, 64), generator=torch.Generator().manual_seed(2))


def levels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image, dtype=np.int64))


def farthest(first: Image.Image, second: Image.Image) -> int:
    """Largest difference of two images, in levels of 255."""
    return int((levels(first) - levels(second)).abs().max())


def decode(
    pipeline: GlmImagePipeline, ids: Tensor, seeds: list[int], prompt: str = PROMPTS[0], guidance_scale: float = 1.5
) -> list[Image.Image]:
    settings = GlmImageSettings(height=64, width=64, num_inference_steps=2, guidance_scale=guidance_scale)
    decoder = GlmImageDecoder(pipeline, settings, FrozenModel(pipeline.transformer))
    preview = torch.zeros(len(ids), token_grids(settings.size, 8).preview.tokens, dtype=torch.long)
    drafts = batch_of([prompt] * len(ids), torch.cat([preview, ids], 1))
    rows = tuple(range(len(ids)))
    request = GroupRequest(prompt, tuple(map(str, rows)), rows, tuple(seeds))
    (painted,) = decoder.sample([request], drafts, size=settings.size, rows_per_call=16)
    return list(painted.images)


# --- the decoder's conditioning


def test_large_grid_is_doubled_along_both_axes() -> None:
    ids = torch.tensor([[8, 9, 1, 2, 3, 4]])
    expected = [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]
    assert large_grid_ids(ids, torch.ones_like(ids).bool(), GRIDS).view(4, 4).tolist() == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [(6, [1, 2, 3, 4]), (4, [1, 2, 2, 2]), (3, [1, 1, 1, 1]), (2, [9, 9, 9, 9]), (1, [8, 8, 8, 8]), (0, [0, 0, 0, 0])],
)
def test_a_short_grid_goes_on_with_its_last_token(written: int, expected: list[int]) -> None:
    mask = torch.arange(6).unsqueeze(0) < written
    for garbage in (0, 72, 74, -1, 16385):
        ids = torch.where(mask, torch.tensor([[8, 9, 1, 2, 3, 4]]), garbage)
        assert large_grid_ids(ids, mask, GRIDS).view(4, 4)[::2, ::2].flatten().tolist() == expected, garbage


# --- images


def test_an_image_is_of_its_seed_and_not_of_the_global_random_state(shipped_pipeline: GlmImagePipeline) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = decode(shipped_pipeline, TOKENS[:2], [7, 8])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    again, other = (decode(shipped_pipeline, TOKENS[:2], seeds) for seeds in ([7, 8], [7, 9]))
    assert [image.tobytes() for image in first] == [image.tobytes() for image in again]
    assert [one.tobytes() == two.tobytes() for one, two in zip(first, other, strict=True)] == [True, False]


@pytest.mark.parametrize(("prompt", "guidance_scale"), [(PROMPTS[0], 1.0), (PROMPTS[2], 1.5)])
def test_a_row_is_decoded_alike_alone_and_in_its_group(
    shipped_pipeline: GlmImagePipeline, prompt: str, guidance_scale: float
) -> None:
    together = decode(shipped_pipeline, TOKENS[:4], [1, 1, 2, 2], prompt, guidance_scale)
    for row, seed in enumerate([1, 1, 2, 2]):
        (alone,) = decode(shipped_pipeline, TOKENS[row : row + 1], [seed], prompt, guidance_scale)
        assert farthest(alone, together[row]) <= 1


def test_glyphs_of_the_same_texts_are_encoded_once(shipped_pipeline: GlmImagePipeline) -> None:
    """With guidance the empty negative prompt is encoded too, for each row and pass."""
    settings = GlmImageSettings(height=64, width=64, num_inference_steps=2, guidance_scale=1.5, sde_window_size=1)
    decoder = GlmImageDecoder(shipped_pipeline, settings, FrozenModel(shipped_pipeline.transformer))
    runs: list[int] = []
    hook = shipped_pipeline.text_encoder.register_forward_hook(lambda *_: runs.append(1))
    try:
        for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[2]):
            request = GroupRequest(prompt, ("a", "b"), (0, 1), (1, 2), (3, 4), window_start=1)
            tokens = batch_of([prompt] * 2, TOKENS[:2, :1].expand(-1, token_grids(settings.size, 8).tokens))
            (drawn,) = decoder.sample([request], tokens, size=settings.size, rows_per_call=2)
            assert drawn.sampled is not None
            scored = decoder.logprobs(drawn.sampled.actions, entropy="none")
            assert torch.equal(scored.logprobs, drawn.sampled.rollout_logprobs)
    finally:
        hook.remove()
    # No text in two of the prompts and in the negative one, "OPEN" in the third.
    assert len(runs) == 2


@pytest.mark.parametrize("size", [(8, 8), (8, 16)])
def test_the_decoders_rotary_table_is_diffusers_own_and_made_once(
    shipped_pipeline: GlmImagePipeline, size: tuple[int, int]
) -> None:
    rope, latents = shipped_pipeline.transformer.rope, torch.zeros(2, 16, *size)
    first, again = rope(latents), rope(latents)
    assert all(one is two for one, two in zip(first, again, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(first, type(rope).forward(rope, latents), strict=True))


def test_the_drafts_tokens_are_dropped_to_the_bit_as_by_diffusers(shipped_pipeline: GlmImagePipeline) -> None:
    """Of some rows, of some places, of all and of none."""
    transformer = shipped_pipeline.transformer
    drop = torch.rand(3, 16, generator=torch.Generator().manual_seed(5)) < 0.5
    drop[0] = True
    for each in (drop, torch.zeros_like(drop)):
        given = {
            "hidden_states": torch.randn(3, transformer.config.in_channels, 16, 16),
            "encoder_hidden_states": torch.randn(3, 2, transformer.config.text_embed_dim),
            "prior_token_id": TOKENS[:3, :16],
            "prior_token_drop": each,
            "timestep": torch.tensor([500.0, 20.0, 3.0]),
            "target_size": torch.full((3, 2), 64.0),
            "crop_coords": torch.zeros(3, 2),
        }
        with torch.no_grad():
            assert torch.equal(transformer(**given).sample, type(transformer).forward(transformer, **given).sample)


# --- through the policy


def batch_of(prompts: list[str], ids: Tensor) -> TokenBatch:
    return TokenBatch(tuple(prompts), ids, torch.ones_like(ids).bool(), 1.0)


def test_only_the_large_grid_reaches_the_image(shipped_pipeline: GlmImagePipeline) -> None:
    policy = build_policy(shipped_pipeline)
    ids = TOKENS[:1, :32].clone()
    preview, large = ids.clone(), ids.clone()
    preview[0, :16] = (preview[0, :16] + 1) % 73
    large[0, 16:] = (large[0, 16:] + 20) % 73
    images = [render(policy, batch_of([PROMPTS[0]], tokens), [1])[0] for tokens in (ids, preview, large)]
    assert images[0].tobytes() == images[1].tobytes()
    assert farthest(images[0], images[2]) > 20


@pytest.mark.parametrize(("height", "width"), [(32, 64), (64, 40)])
def test_a_image_that_is_not_square_has_its_cells_in_place(
    shipped_pipeline: GlmImagePipeline, height: int, width: int
) -> None:
    """One cell's token is changed: the image changes there most."""
    policy = build_policy(shipped_pipeline, height=height, width=width)
    grids = policy.tokens.grids
    ids = torch.zeros(1, grids.tokens, dtype=torch.long)
    marked = ids.clone()
    row, column = 1, grids.large.columns - 1
    marked[0, grids.preview.tokens + row * grids.large.columns + column] = 40
    first, second = (render(policy, batch_of([PROMPTS[0]], tokens), [1])[0] for tokens in (ids, marked))
    assert first.size == (width, height)
    change = (levels(first) - levels(second)).abs().sum(-1).float()
    cells = change.view(height // 8, 8, width // 8, 8).mean((1, 3))
    assert divmod(int(cells.argmax()), grids.large.columns) == (row, column)


# --- images of several sizes

WIDE, TALL, SMALL = ImageSize(64, 32), ImageSize(40, 64), ImageSize(32, 32)


@pytest.mark.parametrize(
    "truncation", [pytest.param(Truncation(), marks=pytest.mark.slow), Truncation(top_p=0.75)], ids=["none", "top_p"]
)
def test_rows_of_several_sizes_are_scored_trained_and_drawn_as_each_alone(
    shipped_pipeline: GlmImagePipeline, truncation: Truncation
) -> None:
    """Whatever the size in the policy's settings is, and with prompts of different lengths, in any order."""
    policy = build_policy(shipped_pipeline, truncation=truncation, temperature=0.9, disturbed=0.05)
    # Batches of other shapes round differently; in fp64 that is far below what a mistake would change.
    policy.tokens.trained.model.double()
    parts = [
        policy.tokens.sample(PROMPTS[first : first + 2], group_size=2, seeds=range(4), size=size)
        for first, size in enumerate((SMALL, TALL, WIDE))
    ]
    order = [5, 0, 11, 3, 8, 7, 2, 10, 1, 4, 9, 6]
    tokens = TokenBatch.join([part.actions for part in parts]).select(order)
    stored = pad_to_longest([part.rollout_logprobs for part in parts])[order]
    policy.sample_with(replace(policy.settings, width=96))
    policy.tokens.prepare_for_update()
    parameters = list(policy.tokens.trainable_parameters().values())
    together = policy.tokens.logprobs(tokens)
    gradient = torch.autograd.grad(together.logprobs.sum(), parameters)
    torch.testing.assert_close(together.logprobs.detach(), stored, rtol=0, atol=1e-5)
    scored = [policy.tokens.logprobs(part.actions) for part in parts]
    expected = torch.autograd.grad(sum(part.logprobs.sum() for part in scored), parameters)
    for found, wanted in zip(gradient, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    entropies = pad_to_longest([part.entropy for part in scored])[order]
    torch.testing.assert_close(together.entropy, entropies, rtol=0, atol=1e-5)
    images = render(policy, tokens, [1] * 12)
    assert [image.size for image in images] == list(tokens.sizes or ())
    for index, row in enumerate(order):
        (alone,) = render(policy, tokens.select([index]).trimmed(), [1])
        assert farthest(alone, images[index]) <= 1, row


def test_a_group_is_sampled_alike_whatever_sizes_the_others_have(shipped_pipeline: GlmImagePipeline) -> None:
    policy = build_policy(shipped_pipeline, disturbed=0.05)
    sizes = [WIDE, WIDE, TALL, WIDE, None]
    requests = [
        GroupRequest(PROMPTS[place % 4], (f"{place}a", f"{place}b"), (2 * place, 2 * place + 1), (7, 7), size=size)
        for place, size in enumerate(sizes)
    ]
    for request, group in zip(requests, collect_rollouts(policy, requests, prompts_per_batch=4), strict=True):
        (alone,) = collect_rollouts(policy, [request], prompts_per_batch=1)
        assert group.request == request
        assert torch.equal(group.streams["tokens"].actions.token_ids, alone.streams["tokens"].actions.token_ids)
        assert group.streams["tokens"].actions.sizes == (request.size or SMALL,) * 2
        assert [image.size for image in group.outputs] == list(group.streams["tokens"].actions.sizes)
        assert group.streams["tokens"].max_length == policy.tokens.grids.tokens
