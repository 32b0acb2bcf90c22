"""The gate sees an image that is not the prompt's, and a placeholder that was never sampled."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from grpo_core.actions import Sources
from grpo_core.errors import NonFiniteError
from grpo_core.parity import ParityError, ParityTolerance, measure_parity, require_parity
from grpo_core.policies.vision_lm.policy import VisionLMPolicy
from grpo_core.records import SampledTokens
from tests.grpo_core.policies.vision_lm.tiny_families import (
    KINDS,
    OTHERS,
    drawn,
    make_policy,
)


@cache
def sampled_by(kind: str) -> tuple[VisionLMPolicy, SampledTokens]:
    """A policy of a family with what it drew; never changed."""
    policy = make_policy(kind)
    return policy, drawn(policy, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gate_refuses_another_image_by_the_sample_s_name(kind: str) -> None:
    policy, sampled = sampled_by(kind)
    actions = sampled.actions
    rows = range(0, len(actions), 3)
    given = [actions.sources[row] for row in rows] if actions.sources else []
    other = OTHERS[: len(given)]
    swapped = (given[0], tuple(reversed(given[1])), *given[2:])
    cases = {"another image": (other[0], *given[1:]), "a swapped pair": swapped}
    for name, sources in cases.items():
        changed: Sources = tuple(each for each in sources for _ in range(3))
        with torch.no_grad():
            wrong = policy.logprobs(replace(actions, sources=changed)).logprobs
        names = [f"{row // 3}-{row % 3}" for row in range(len(actions))]
        report = measure_parity(names, sampled.rollout_logprobs, wrong, actions.loss_mask)
        at = "0" if name == "another image" else "1"
        assert {each[0] for each in report.worst_samples} == {at}, name
        with pytest.raises(ParityError, match=f"worst samples: {at}-"):
            require_parity(report, ParityTolerance())


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_the_gate_refuses_a_missing_image(kind: str) -> None:
    policy, whole = sampled_by(kind)
    sampled = whole.select(range(3))
    with torch.no_grad():
        wrong = policy.logprobs(replace(sampled.actions, sources=None)).logprobs
    report = measure_parity(["a", "b", "c"], sampled.rollout_logprobs, wrong, sampled.actions.loss_mask)
    with pytest.raises(ParityError):
        require_parity(report, ParityTolerance())


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3"])
def test_a_stored_placeholder_is_refused(kind: str) -> None:
    policy, sampled = sampled_by(kind)
    placeholder = policy.placeholders.ids[0]
    forged = replace(sampled.actions, token_ids=torch.full_like(sampled.actions.token_ids, placeholder))
    with torch.no_grad():
        found = policy.logprobs(forged).logprobs
    with pytest.raises(NonFiniteError):
        measure_parity(list("abcdefghijkl"), sampled.rollout_logprobs, found, forged.loss_mask)
