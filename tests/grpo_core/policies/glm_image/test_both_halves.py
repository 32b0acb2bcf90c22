"""Token model and decoder in one policy: each stream with its own actions, weights and reference."""

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.parity import ParityTolerance
from grpo_core.policies.glm_image.family import FAMILY
from grpo_core.policies.glm_image.loading import DECODER_LINEARS, RELEASED_MODEL
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.records import GroupRequest, RolloutGroup
from grpo_core.rollouts.streams import STREAMS, Stream
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from tests.grpo_core.policies.trained.tiny_models import disturb, values_of
from tests.tiny_policies import MODEL, PROMPTS

SETTINGS = GlmImageSettings(height=32, width=64, num_inference_steps=4, guidance_scale=1.5, sde_window_size=2)
LORA = TrainingChoice(LoraSettings(rank=4, alpha=8.0))
PARITY: dict[Stream, ParityTolerance] = {"tokens": ParityTolerance(), "denoising": ParityTolerance(1e-5, 1e-6)}
# The first of two drafts three times, the second once.
UNEVEN = {"seeds": (5, 5, 5, 6), "noise_seeds": (1, 1, 1, 1), "step_seeds": (11, 12, 13, 14)}


def loaded(trained: Sequence[Stream] = STREAMS, disturbed: float = 0.02) -> GlmImagePolicy:
    policy = GlmImagePolicy.load(str(MODEL), SETTINGS, dict.fromkeys(trained, LORA))
    for component in policy.components.values():
        disturb(component.trainable_parameters(), disturbed)
    return policy


def request(prompt: str, window_start: int | None = 1) -> GroupRequest:
    return GroupRequest(prompt, tuple(f"{prompt[:8]} {row}" for row in range(4)), **UNEVEN, window_start=window_start)


@pytest.fixture(scope="module")
def both() -> tuple[GlmImagePolicy, list[RolloutGroup]]:
    policy = loaded()
    return policy, list(collect_rollouts(policy, [request(prompt) for prompt in PROMPTS[:2]], prompts_per_batch=2))


def steps_of(group: RolloutGroup) -> DenoisingBatch:
    actions = group.streams["denoising"].actions
    assert isinstance(actions, DenoisingBatch)
    return actions


def test_renderings_share_their_draft_and_part_at_the_first_noisy_step(
    both: tuple[GlmImagePolicy, list[RolloutGroup]],
) -> None:
    _, groups = both
    for group in groups:
        ids, states = group.streams["tokens"].actions.token_ids, steps_of(group).states
        assert torch.equal(ids[0], ids[1])
        assert torch.equal(ids[0], ids[2])
        assert not torch.equal(ids[0], ids[3])
        assert torch.equal(states[0][0], states[1][0])
        assert not torch.equal(states[0][1], states[1][1])
        assert not torch.equal(states[0][0], states[3][0])


def test_a_frozen_half_samples_what_the_trained_one_does_before_training() -> None:
    """Adapters start at zero, so each half alone and both together sample the same."""
    everything = [
        next(collect_rollouts(loaded(trained, 0.0), [request(PROMPTS[0])], prompts_per_batch=1))
        for trained in (STREAMS, ("tokens",), ("denoising",))
    ]
    first, *others = everything
    for other in others:
        assert torch.equal(first.streams["tokens"].actions.token_ids, other.streams["tokens"].actions.token_ids)
        assert all(map(torch.equal, steps_of(first).states, steps_of(other).states))
        assert [image.tobytes() for image in first.outputs] == [image.tobytes() for image in other.outputs]


@pytest.mark.parametrize("stream", STREAMS)
def test_an_update_of_one_stream_moves_its_half_alone(
    both: tuple[GlmImagePolicy, list[RolloutGroup]], stream: Stream
) -> None:
    policy, groups = both
    before = {name: values_of(half.trainable_parameters()) for name, half in policy.components.items()}
    rewarded = torch.tensor([[1.0, -1.0, 0.0, torch.nan]] * 2)
    if stream == "tokens":
        rewarded = torch.tensor([[1.0, torch.nan, torch.nan, -1.0]] * 2)
    rows = join_groups(groups, rewarded, stream)
    half = policy.components[stream]
    optimizer = PolicyOptimizer(half.trainable_parameters(), OptimizerSettings(1e-3))
    settings = UpdateSettings(micro_batch_size=4, clip_range=1e-4 if stream == "denoising" else 0.2)
    update_policy(half, optimizer, rows, settings, seed=0, parity=PARITY[stream])
    with torch.no_grad():
        gained = (half.logprobs(rows.actions).logprobs - rows.rollout_logprobs).mean(-1)
    for name, other in policy.components.items():
        changed = {key: bool((value != before[name][key]).any()) for key, value in other.trainable_parameters().items()}
        assert any(changed.values()) == (name == stream)
        disturb_back(other.trainable_parameters(), before[name])
    assert float(gained @ rows.advantages) > 0


@torch.no_grad()
def disturb_back(parameters: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def test_default_adapters_of_the_released_decoder() -> None:
    """31.5 M parameters on attention and 39.3 M on feed-forward layers at rank 32: 30 layers of width 4096."""
    decoder = FAMILY.build_on_meta(RELEASED_MODEL, "transformer")
    shapes = [
        (module.in_features, module.out_features)
        for name, module in decoder.named_modules()
        if re.fullmatch(DECODER_LINEARS, name)
    ]
    assert sum(32 * (wide + high) for wide, high in shapes) == 30 * 32 * (4 * 2 * 4096 + 2 * (4096 + 16384))
