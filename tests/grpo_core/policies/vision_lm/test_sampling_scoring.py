"""Stored and recomputed log-probs agree in every family, and the gate sees an image that is not the prompt's."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from grpo_core.actions import Sources
from grpo_core.errors import NonFiniteError
from grpo_core.parity import ParityError, ParityTolerance, measure_parity, require_parity
from grpo_core.policies.vision_lm.policy import VisionLMPolicy
from grpo_core.policies.vision_lm.prompts import process_prompt
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.records import SampledTokens
from tests.grpo_core.policies.vision_lm.tiny_families import (
    KINDS,
    OTHERS,
    difference,
    drawn,
    make_policy,
    plain_logprobs,
    requested,
)

PARITY = 1e-5


@cache
def sampled_by(kind: str) -> tuple[VisionLMPolicy, SampledTokens]:
    """A policy of a family with what it drew; never changed."""
    policy = make_policy(kind)
    return policy, drawn(policy, kind)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_log_probs_agree_with_those_of_the_update_and_of_a_plain_pass(kind: str) -> None:
    """Siblings of prompts with images of several sizes, with two, and one without any."""
    policy, sampled = sampled_by(kind)
    actions = sampled.actions
    assert float(sampled.rollout_logprobs.abs().max()) > 0.1
    assert difference(policy, sampled) < PARITY
    policy.prepare_for_update()
    assert difference(policy, sampled) < PARITY
    for row in range(0, len(actions), 3):
        plain = plain_logprobs(policy, actions, row)
        torch.testing.assert_close(sampled.rollout_logprobs[row, : len(plain)], plain, rtol=0, atol=PARITY)


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


@pytest.mark.parametrize("kind", ["qwen3_vl", "mistral3", "paligemma"])
def test_a_sample_depends_on_its_prompt_its_images_and_its_seed_alone(kind: str) -> None:
    policy = make_policy(kind)
    together = drawn(policy, kind).actions
    prompts, sources = requested(kind)
    for place in range(len(prompts)):
        alone = policy.sample_tokens([prompts[place]], 1, [3 * place], sources=(sources[place],)).actions
        mask = together.loss_mask[3 * place]
        assert alone.token_ids[0, alone.loss_mask[0]].tolist() == together.token_ids[3 * place, mask].tolist()


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3"])
def test_placeholders_are_never_drawn_and_have_no_mass(kind: str) -> None:
    policy = make_policy(kind, VisionLMSettings(max_completion_length=4, top_k=50))
    drawn(policy, kind)
    head = policy._model.get_output_embeddings()
    ids = list(policy.placeholders.ids)

    def raised(module: object, inputs: object, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_add(-1, torch.tensor(ids), torch.full((*logits.shape[:-1], len(ids)), 50.0))

    with torch.no_grad():
        handle = head.register_forward_hook(raised)
        sampled = drawn(policy, kind)
    assert not torch.isin(sampled.actions.token_ids, torch.tensor(ids)).any()
    assert sampled.actions.support is not None
    assert not torch.isin(sampled.actions.support.ids, torch.tensor(ids)).any()
    assert difference(policy, sampled) < PARITY
    handle.remove()
    forged = replace(sampled.actions, token_ids=sampled.actions.token_ids.fill_(ids[0]), support=None)
    with torch.no_grad():
        found = policy.logprobs(forged).logprobs
    with pytest.raises(NonFiniteError):
        measure_parity(list("abcdefghijkl"), sampled.rollout_logprobs, found, forged.loss_mask)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava_onevision", "idefics3"])
def test_greedy_tokens_are_those_of_generate(kind: str) -> None:
    policy = make_policy(kind, VisionLMSettings(max_completion_length=6, temperature=1e-5))
    prompts, sources = requested(kind)
    read = process_prompt(policy.processor, policy.settings, prompts[2], [sources[2][0].open()], policy.placeholders)
    likeliest = policy._model.generate(
        input_ids=torch.tensor([read.ids]),
        attention_mask=torch.ones(1, len(read.ids), dtype=torch.long),
        **{name: each.unsqueeze(0) for name, each in read.token_types.items()},
        **policy.processor.image_processor([[sources[2][0].open()]], return_tensors="pt"),
        do_sample=False,
        max_new_tokens=6,
        pad_token_id=0,
        suppress_tokens=list(policy.placeholders.ids),
    )[0, len(read.ids) :].tolist()
    sampled = policy.sample_tokens([prompts[2]], 1, [0], sources=(sources[2],)).actions
    assert sampled.token_ids[0, sampled.loss_mask[0]].tolist() == likeliest
