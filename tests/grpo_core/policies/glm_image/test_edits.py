"""Edits of source images: what is sampled and scored is what the stock classes compute, and other sources are seen."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline
from PIL import Image
from torch import Tensor

from data.recipes.edits import Edit, all_edits
from data.recipes.shapes import draw
from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.errors import InputError
from grpo_core.parity import ParityTolerance
from grpo_core.policies.glm_image.family import FAMILY
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.glm_image.sources import SourceEncoder
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import DenoisingBatch, TokenBatch, pad_to_longest
from grpo_core.rollouts.images import SourceImage, encode_png
from grpo_core.rollouts.records import GroupRequest, RolloutGroup
from grpo_core.rollouts.streams import STREAMS, ImageSize
from grpo_core.update.distributed import ShardedProcessGroup
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.process_group import SINGLE_PROCESS, ProcessGroup
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from tests.grpo_core.policies.trained.tiny_models import disturb, values_of
from tests.processes import in_processes
from tests.tiny_policies import EDIT_MODEL, MODEL

SETTINGS = GlmImageSettings(height=32, width=64, num_inference_steps=4, guidance_scale=1.5, sde_window_size=2)
FULL, ADAPTERS = TrainingChoice(lora=None), TrainingChoice(LoraSettings(rank=4, alpha=8.0))


def source(edit: Edit, size: tuple[int, int] = (64, 64)) -> SourceImage:
    """The edit's source image; larger ones show it on a larger canvas."""
    canvas = Image.new("RGB", size, (20, 20, 20))
    canvas.paste(draw(edit.source))
    return SourceImage.of(encode_png(canvas))


EDITS = all_edits()[::700]
SQUARE, WIDE, OTHER = source(EDITS[0]), source(EDITS[1], (128, 64)), source(EDITS[2])
# Two prompts of one text and other images, as edits have them, of different sizes and lengths.
PROMPTS: list[tuple[str, tuple[SourceImage, ...]]] = [
    ("make the circle blue", (SQUARE,)),
    ("make the circle blue", (WIDE,)),
    ('<image> write "OPEN" at the top', (OTHER,)),
]


def loaded(choice: TrainingChoice = ADAPTERS, settings: GlmImageSettings = SETTINGS, noise: float = 0.02) -> Any:
    policy = GlmImagePolicy.load(str(EDIT_MODEL), settings, dict.fromkeys(STREAMS, choice))
    for component in policy.components.values():
        disturb(component.trainable_parameters(), noise)
    return policy


def request(prompt: str, sources: tuple[SourceImage, ...], window_start: int | None = 1) -> GroupRequest:
    names = tuple(f"{prompt[:6]} {[each.digest[:4] for each in sources]} {row}" for row in range(3))
    # The first of two drafts twice.
    return GroupRequest(
        prompt, names, (5, 5, 6), (1, 1, 1), (11, 12, 13), SETTINGS.size, window_start=window_start, sources=sources
    )


MIXED = [
    *(request(*prompt) for prompt in PROMPTS),
    request("join them", (OTHER, SQUARE)),
    request("a red circle", ()),
]


@pytest.fixture(scope="module")
def collected() -> tuple[GlmImagePolicy, list[RolloutGroup]]:
    """Adapters away from zero, groups of one and two sources and of none; not to be changed."""
    policy = loaded()
    return policy, list(collect_rollouts(policy, MIXED, prompts_per_batch=4))


@pytest.fixture(scope="module")
def full() -> tuple[GlmImagePolicy, list[RolloutGroup]]:
    """All weights as they were loaded, and groups of one source; updates with a tiny learning rate may change them."""
    policy = loaded(FULL, noise=0.0)
    requests = [request(*prompt) for prompt in PROMPTS]
    return policy, list(collect_rollouts(policy, requests, prompts_per_batch=3))


def tokens_of(groups: Sequence[RolloutGroup]) -> tuple[TokenBatch, Tensor]:
    rows = join_groups(groups, torch.ones(len(groups), 3))
    assert isinstance(rows.actions, TokenBatch)
    return rows.actions, rows.rollout_logprobs


def steps_of(groups: Sequence[RolloutGroup]) -> tuple[DenoisingBatch, Tensor]:
    rows = join_groups(groups, torch.ones(len(groups), 3), "denoising")
    assert isinstance(rows.actions, DenoisingBatch)
    return rows.actions, rows.rollout_logprobs


# --- the stock processor and model as the oracle


def stock_inputs(policy: GlmImagePolicy, prompts: Sequence[tuple[str, Sequence[SourceImage]]]) -> Any:
    content = [
        [
            *({"type": "image", "image": policy.tokens.sources.image(each)} for each in sources),
            {"type": "text", "text": text},
        ]
        for text, sources in prompts
    ]
    kwargs = {"padding": True, "target_h": 32, "target_w": 64, "return_tensors": "pt"}
    messages = [[{"role": "user", "content": each}] for each in content]
    return policy.tokens.pipeline.processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, processor_kwargs=kwargs
    )


@pytest.mark.parametrize("sources", [1, 2])
def test_ids_and_positions_are_those_of_the_processor_and_the_model(
    collected: tuple[GlmImagePolicy, list[RolloutGroup]], sources: int
) -> None:
    policy, _ = collected
    prompts = [("make the circle blue", (SQUARE, WIDE)[:sources]), ("make it", (WIDE, OTHER)[:sources])]
    inputs, model = stock_inputs(policy, prompts), policy.tokens._base.model
    features = model.get_image_features(
        inputs["pixel_values"], inputs["image_grid_thw"], inputs["images_per_sample"]
    ).pooler_output
    ids = inputs["input_ids"]
    ids = ids.masked_scatter(ids == policy.tokens._base.config.image_token_id, model.get_image_tokens(features))
    expected, _ = model.get_rope_index(
        inputs["input_ids"], inputs["image_grid_thw"], inputs["images_per_sample"], inputs["attention_mask"]
    )
    decoded = model._cached_decode_position_ids.permute(1, 0, 2)
    encoded = policy.tokens.encode([text for text, _ in prompts], [SETTINGS.size] * 2, tuple(own for _, own in prompts))
    attended = inputs["attention_mask"]
    assert torch.equal(encoded.input_ids, ids * attended)
    assert torch.equal(encoded.attention_mask, attended)
    assert torch.equal(encoded.position_ids, expected * attended)
    assert torch.equal(encoded.positions(decoded.shape[-1]), decoded)


def test_images_are_those_of_the_pipeline_itself(full: tuple[GlmImagePolicy, list[RolloutGroup]]) -> None:
    """The stock pipeline takes each row's sources through its decoder; here they are shared."""
    policy, _ = full
    (group,) = collect_rollouts(policy, [request(*PROMPTS[1], window_start=None)], prompts_per_batch=1)
    assert set(group.streams) == {"tokens"}
    codes = policy.tokens.sources.codes(WIDE)
    doubled = codes.repeat_interleave(2, 0).repeat_interleave(2, 1)
    large = group.streams["tokens"].actions.token_ids.reshape(-1, 4, 8)
    own = policy.decoder.pipeline(
        [PROMPTS[1][0]] * 3,
        image=[[WIDE.open()]] * 3,
        height=32,
        width=64,
        prior_token_ids=large.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1),
        prior_token_image_ids=[doubled.flatten()] * 3,
        source_image_grid_thw=[torch.tensor([[1, 16, 32]])] * 3,
        generator=[torch.Generator().manual_seed(1) for _ in range(3)],
        num_inference_steps=4,
        guidance_scale=1.5,
    ).images
    assert [image.tobytes() for image in group.outputs] == [image.tobytes() for image in own]
    other = list(collect_rollouts(policy, [request(PROMPTS[1][0], (), window_start=None)], prompts_per_batch=1))
    assert other[0].outputs[0].tobytes() != own[0].tobytes()


# --- stored and recomputed


@torch.no_grad()
def test_stored_and_recomputed_log_probs_agree_in_double_precision() -> None:
    policy = loaded()
    policy.tokens.trained.model.double()
    texts, sources = [each.prompt for each in MIXED], tuple(each.sources for each in MIXED)
    sampled = [
        policy.tokens.sample(texts[:4], group_size=1, seeds=range(4), sources=sources[:4]),
        policy.tokens.sample(texts[4:], group_size=1, seeds=[4]),
    ]
    policy.tokens.prepare_for_update()
    tokens = TokenBatch.join([each.actions for each in sampled])
    logprobs = pad_to_longest([each.rollout_logprobs for each in sampled])
    assert tokens.loss_mask.sum(-1).tolist() == [32] * 4 + [42]
    found = torch.where(tokens.loss_mask, policy.tokens.logprobs(tokens).logprobs, 0.0)
    torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-6)
    for row in (1, 3, 4):
        alone = policy.tokens.logprobs(tokens.select([row]).trimmed()).logprobs
        torch.testing.assert_close(alone[0], found[row, : alone.shape[1]], rtol=0, atol=1e-6)


@torch.no_grad()
def test_stored_and_recomputed_steps_agree(collected: tuple[GlmImagePolicy, list[RolloutGroup]]) -> None:
    policy, groups = collected
    policy.decoder.prepare_for_update()
    steps, logprobs = steps_of(groups)
    torch.testing.assert_close(policy.decoder.logprobs(steps).logprobs, logprobs, rtol=0, atol=1e-6)
    for row in (4, 10, 14):
        alone = policy.decoder.logprobs(steps.select([row])).logprobs
        torch.testing.assert_close(alone[0], logprobs[row], rtol=0, atol=1e-6)


@torch.no_grad()
def test_other_sources_are_seen_in_their_rows_alone(collected: tuple[GlmImagePolicy, list[RolloutGroup]]) -> None:
    """Another image, an exchanged pair, and none at all."""
    policy, groups = collected
    (tokens, by_tokens), (steps, by_steps) = tokens_of(groups[:4]), steps_of(groups[:4])
    own = tokens.sources or ()
    another = [(SQUARE,), (OTHER,), (OTHER,), (OTHER, SQUARE)]
    exchanged = [(SQUARE,), (WIDE,), (OTHER,), (SQUARE, OTHER)]
    for wrong in (another, exchanged, None):
        sources = None if wrong is None else tuple(each for each in wrong for _ in range(3))
        off = torch.tensor([given != right for given, right in zip(sources or [None] * 12, own, strict=True)])
        assert off.any()
        found = policy.tokens.logprobs(replace(tokens, sources=sources)).logprobs
        apart = (found - by_tokens).abs().amax(1)
        assert float(apart[off].min()) > 0.1
        assert not (apart[~off] > 1e-3).any()
        # To the decoder the order of its sources is the same.
        if wrong is not exchanged:
            again = policy.decoder.logprobs(replace(steps, sources=sources)).logprobs
            moved = (again - by_steps).abs().amax(1)
            assert float(moved[off].min()) > 1e-5
            assert not (moved[~off] > 1e-6).any()


# --- gradients


def gradient_of_update(policy: GlmImagePolicy, stream: Any, groups: list[RolloutGroup], advantages: Tensor) -> Any:
    """The gradient of one optimizer step, out of the optimizer's first moment."""
    component, rows = policy.components[stream], join_groups(groups, advantages, stream)
    optimizer = PolicyOptimizer(component.trainable_parameters(), OptimizerSettings(1e-9, betas=(0.5, 0.999)))
    settings = UpdateSettings(micro_batch_size=3, max_grad_norm=1e9, clip_range=1e-4)
    # The attention of the shipped token model is sharp: single tokens round by up to 1e-4, by the processor.
    parity = ParityTolerance() if stream == "tokens" else ParityTolerance(1e-5, 1e-6)
    update_policy(component, optimizer, rows, settings, seed=0, parity=parity)
    return {name: 2 * value for name, value in optimizer.state().items() if name.endswith("|exp_avg")}


ADVANTAGES = torch.tensor([[1.0, -0.5, 0.25], [-1.0, 2.0, 0.5], [0.0, 1.0, -1.0]])


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_decoders_gradient_is_that_of_the_pipeline_without_sharing(
    full: tuple[GlmImagePolicy, list[RolloutGroup]], monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    """The pass that writes the cache has a part in it: without that part the gradient is another."""
    policy, groups = full
    if checkpointing:
        policy = loaded(TrainingChoice(lora=None, gradient_checkpointing=True), noise=0.0)
    written: list[bool] = []
    handle = policy.decoder.pipeline.transformer.register_forward_hook(
        lambda module, args, kwargs, output: written.append(kwargs["kv_caches"][0].mode == "write"), with_kwargs=True
    )
    found = gradient_of_update(policy, "denoising", groups, ADVANTAGES)
    handle.remove()
    assert sum(written) == 3 * 3
    plain = loaded(FULL, noise=0.0)
    monkeypatch.setattr("grpo_core.policies.glm_image.decoding.shared_by_rows", lambda transformer: torch.enable_grad())
    rows = join_groups(groups, ADVANTAGES, "denoising")
    logprobs = plain.decoder.logprobs(rows.actions).logprobs
    (-(rows.advantages[:, None] * logprobs).sum() / logprobs.numel()).backward()
    for name, parameter in plain.decoder.trainable_parameters().items():
        assert parameter.grad is not None
        torch.testing.assert_close(found[f"{name}|exp_avg"], parameter.grad, rtol=1e-3, atol=1e-7)


# --- several processes


def update_of_edits(policy: GlmImagePolicy, process_group: ProcessGroup) -> None:
    """Processes have rows with other images, and one a row without any; nothing is encoded before."""
    groups = list(collect_rollouts(loaded(noise=0.0), [*MIXED[:2], MIXED[4]], prompts_per_batch=4))
    rows = join_groups(groups, ADVANTAGES)
    process_group.distribute(policy.tokens.trained)
    optimizer = PolicyOptimizer(policy.tokens.trainable_parameters(), OptimizerSettings(1e-3))
    settings = UpdateSettings(micro_batch_size=2, max_grad_norm=1e9)
    update_policy(policy.tokens, optimizer, rows, settings, seed=0, process_group=process_group)
    process_group.collect(policy.tokens.trained)


def update_in_shares(folder: Path) -> None:
    torch.set_num_threads(1)
    process_group, policy = ShardedProcessGroup(torch.device("cpu")), loaded(noise=0.0)
    update_of_edits(policy, process_group)
    if process_group.rank == 0:
        torch.save(values_of(policy.tokens.trainable_parameters()), folder / "weights.pt")


@pytest.mark.slow
def test_processes_that_share_the_weights_encode_their_own_images(tmp_path: Path) -> None:
    in_processes(2, update_in_shares, tmp_path)
    policy = loaded(noise=0.0)
    before = values_of(policy.tokens.trainable_parameters())
    update_of_edits(policy, SINGLE_PROCESS)
    shared = torch.load(tmp_path / "weights.pt")
    for name, value in policy.tokens.trainable_parameters().items():
        # Adam's first step is the learning rate, in the direction of the gradient.
        moved, other = value - before[name], shared[name] - before[name]
        assert float(((moved - other).abs() > 1e-4).float().mean()) < 0.01


# --- export


@torch.no_grad()
def test_an_exported_model_makes_the_edits_that_were_trained(
    collected: tuple[GlmImagePolicy, list[RolloutGroup]], tmp_path: Path
) -> None:
    policy, groups = collected
    folders = {stream: tmp_path / stream for stream in STREAMS}
    for folder in (*folders.values(), tmp_path / "whole"):
        folder.mkdir()
    for stream, folder in folders.items():
        policy.components[stream].save_weights(folder)
    FAMILY.save_whole(EDIT_MODEL, folders, tmp_path / "whole", dtype=torch.float32)
    exported = GlmImagePolicy.load(str(tmp_path / "whole"), SETTINGS, {})
    tokens, _ = tokens_of(groups[:4])
    expected = policy.tokens.logprobs(tokens).logprobs
    torch.testing.assert_close(exported.tokens.logprobs(tokens).logprobs, expected, rtol=0, atol=1e-3)
    base = loaded(noise=0.0)
    assert float((base.tokens.logprobs(tokens).logprobs - expected).abs().max()) > 0.1
    request_of = replace(groups[1].request, window_start=None, step_seeds=())
    drafts = tokens_of(groups[1:2])[0]
    images = [
        np.asarray(each.decoder.sample([request_of], drafts, size=SETTINGS.size, rows_per_call=3)[0].images[0], float)
        for each in (policy, exported, base)
    ]
    assert abs(images[0] - images[1]).max() <= 1
    assert abs(images[0] - images[2]).max() > 1


# --- sources are encoded once


def test_codes_are_computed_once_per_image(
    full: tuple[GlmImagePolicy, list[RolloutGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, encoded = loaded(), list[tuple[int, int]]()
    original = policy.tokens.sources._encode

    def counted(image: Image.Image) -> Tensor:
        encoded.append(image.size)
        return original(image)

    monkeypatch.setattr(policy.tokens.sources, "_encode", counted)
    for text, sources in PROMPTS[:2]:
        policy.tokens.sample([text], group_size=1, seeds=[0], sources=(sources,))
    groups = full[1]
    policy.tokens.logprobs(tokens_of(groups)[0])
    policy.decoder.logprobs(steps_of(groups)[0])
    again = SourceImage.of(SQUARE.content)
    assert torch.equal(policy.tokens.sources.codes(again), policy.tokens.sources.codes(SQUARE))
    assert encoded == [(64, 64), (128, 64), (64, 64)]


def test_codes_do_not_depend_on_autocast() -> None:
    policy = loaded(noise=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = policy.tokens.sources.codes(WIDE)
    assert torch.equal(found, loaded(noise=0.0).tokens.sources.codes(WIDE))


def test_small_sources_are_read_as_their_enlargement() -> None:
    policy = loaded(noise=0.0)
    image = draw(EDITS[0].source).resize((40, 33), Image.Resampling.NEAREST)
    small = SourceImage.of(encode_png(image))
    enlarged = SourceImage.of(encode_png(image.resize((80, 64), Image.Resampling.BICUBIC)))
    assert policy.tokens.sources.codes(small).shape == (8, 10)
    assert torch.equal(policy.tokens.sources.codes(small), policy.tokens.sources.codes(enlarged))


# --- refusals


def test_images_that_cannot_be_read_are_refused_before_a_model_loads() -> None:
    square, long = ImageSize(64, 64), ImageSize(64, 258)
    FAMILY.refuse_prompts(str(EDIT_MODEL), SETTINGS, ["make it blue", "a red circle"], [(square, square), ()])
    with pytest.raises(InputError, match="at most 4 short sides") as refused:
        FAMILY.refuse_prompts(str(EDIT_MODEL), SETTINGS, ["make it blue", "and red"], [(square,), (long,)])
    assert refused.value.place == "source image of prompt 2"
    with pytest.raises(InputError, match="4096 positions") as refused:
        FAMILY.refuse_prompts(str(EDIT_MODEL), SETTINGS, ["make it blue"], [(ImageSize(256, 256),) * 4])
    assert refused.value.value == "4 images"
    with pytest.raises(InputError, match="code for 32 pixels") as refused:
        FAMILY.refuse_prompts(str(MODEL), SETTINGS, ["make it blue"], [(square,)])
    assert refused.value.place == "policy.model"


def test_a_model_that_cannot_edit_refuses_sources(shipped_pipeline: GlmImagePipeline) -> None:
    with pytest.raises(InputError, match="code for 32 pixels"):
        SourceEncoder(shipped_pipeline).codes(SQUARE)


def test_a_truncated_source_is_refused_by_its_digest(collected: tuple[GlmImagePolicy, list[RolloutGroup]]) -> None:
    broken = SourceImage.of(SQUARE.content[:-100])
    with pytest.raises(InputError, match=broken.digest[:16]):
        collected[0].tokens.sources.codes(broken)
