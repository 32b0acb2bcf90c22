"""What holds for every model that samples tokens: texts, texts about images, and GLM-Image's codes.

Stored and recomputed log-probs agree, transformers' own passes give the same, and each known way to get them wrong is
seen.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import GlmImagePipeline
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.parity import ParityError, ParityTolerance, measure_parity, require_parity
from grpo_core.policies import kv_cache
from grpo_core.policies.causal_lm.decode_steps import StaticStep
from grpo_core.policies.causal_lm.model_types import refuse_static_cache
from grpo_core.policies.kv_cache import FixedLayer
from grpo_core.rollouts.actions import TokenBatch
from grpo_core.rollouts.records import SampledTokens
from tests.grpo_core.policies.causal_lm.model_types import CONFIGS, HEAD_ROWS, change_inputs
from tests.grpo_core.policies.samplers import GRIDS, SAMPLERS, Sampler, decoded, make_sampler, own_inputs, whole_pass
from tests.grpo_core.policies.vision_lm.tiny_families import KINDS, plain_logprobs

PARITY = 1e-5
CUTS = ("top_k", "top_p", "min_p", "all cuts")
Make = Callable[..., Sampler]


@pytest.fixture(scope="module")
def make(shipped_pipeline: GlmImagePipeline) -> Make:
    """Make a sampler whose trained weights are not where they start from."""
    return partial(make_sampler, shipped_pipeline)


Drawn = Callable[[str, str], tuple[Sampler, SampledTokens]]


@pytest.fixture(scope="module")
def drawn(make: Make) -> Drawn:
    """Return a sampler, which no test changes, with siblings of all its prompts."""
    known: dict[tuple[str, str], tuple[Sampler, SampledTokens]] = {}

    def found(kind: str, sampling: str) -> tuple[Sampler, SampledTokens]:
        if (kind, sampling) not in known:
            sampler = make(kind, **SAMPLERS[sampling])
            known[kind, sampling] = sampler, sampler.draw_all()
        return known[kind, sampling]

    return found


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        *((kind, "all cuts") for kind in CONFIGS),
        *((kind, each) for kind in ("llama", "gemma2") for each in SAMPLERS if each not in ("all cuts", "greedy")),
        *((kind, "whole distribution") for kind in KINDS),
        *((kind, "whole distribution") for kind in GRIDS),
        *(("wide codes", each) for each in ("warm", *CUTS)),
    ],
)
def test_stored_and_recomputed_log_probs_agree(drawn: Drawn, kind: str, sampling: str) -> None:
    """Siblings of prompts of several lengths, with images of several sizes, with two, and one without any."""
    sampler, sampled = drawn(kind, sampling)
    assert float(sampled.rollout_logprobs.abs().max()) > 0.1
    sampler.component.prepare_for_sampling()
    assert sampler.difference(sampled) < PARITY
    sampler.component.prepare_for_update()
    assert sampler.difference(sampled) < PARITY


@pytest.mark.parametrize(("kind", "sampling"), [("llama", "all cuts"), ("wide codes", "top_p")])
def test_the_gate_names_the_cuts_where_their_ids_are_not_stored(drawn: Drawn, kind: str, sampling: str) -> None:
    sampler, sampled = drawn(kind, sampling)
    everything = replace(sampled.actions, support=None)
    with pytest.raises(ParityError, match="top-k and top-p"):
        gate(sampler, sampled, everything, ParityTolerance(0.1, 0.01))


@torch.no_grad()
def gate(sampler: Sampler, sampled: SampledTokens, actions: TokenBatch, tolerance: ParityTolerance) -> None:
    found, names = sampler.component.logprobs(actions).logprobs, [str(row) for row in range(len(actions))]
    require_parity(measure_parity(names, sampled.rollout_logprobs, found, actions.loss_mask), tolerance)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "wide codes"])
@torch.no_grad()
def test_a_row_is_scored_as_alone(drawn: Drawn, kind: str) -> None:
    sampler, sampled = drawn(kind, "top_p")
    together = sampler.component.logprobs(sampled.actions)
    for row in range(len(sampled.actions)):
        alone = sampler.component.logprobs(sampled.actions.select([row]).trimmed())
        time = alone.logprobs.shape[1]
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[row, :time], rtol=0, atol=PARITY)
        torch.testing.assert_close(alone.entropy[0], together.entropy[row, :time], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bloom", "qwen3_vl", "mistral3", "paligemma", "wide codes"])
def test_a_sample_depends_on_its_prompt_its_images_and_its_seed_alone(drawn: Drawn, kind: str) -> None:
    sampler, together = drawn(kind, "whole distribution")
    torch.manual_seed(0)
    for row in sorted({*range(0, len(together.actions), 4), len(together.actions) - 1}):
        alone = sampler.draw([row // 3], 1, [row])
        written = alone.actions.loss_mask.sum()
        assert alone.actions.token_ids[0, :written].tolist() == ids_of(together.actions, row)
        stored = together.rollout_logprobs[row, :written]
        torch.testing.assert_close(alone.rollout_logprobs[0, :written], stored, rtol=0, atol=PARITY)


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        ("llama", "stop texts"),
        ("gpt2", "all cuts"),
        ("qwen2_vl", "whole distribution"),
        ("qwen3_vl", "whole distribution"),
        ("wide codes", "top_p"),
    ],
)
def test_a_static_cache_gives_the_same_samples(
    drawn: Drawn, make: Make, kind: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken anew when it is full, and when rows have ended."""
    _, growing = drawn(kind, sampling)
    monkeypatch.setattr(kv_cache, "_GROWTH", 3)
    monkeypatch.setattr(StaticStep, "shrinks_at", 0.99)
    sampler = make(kind, **SAMPLERS[sampling])
    sampler.component.settings = replace(sampler.component.settings, cache_implementation="static")
    moved, passes = count_calls(monkeypatch, FixedLayer, "move"), count_calls(monkeypatch, StaticStep, "_pass")
    kept = count_calls(monkeypatch, StaticStep, "keep")
    static = sampler.draw_all()
    assert bool(kept) == (kind == "llama"), "no row of the others ends before the last token"
    assert moved or kind in KINDS, "their prompts leave room for all tokens"
    assert len(passes) == growing.actions.loss_mask.shape[1] - 1
    assert torch.equal(static.actions.token_ids, growing.actions.token_ids)
    torch.testing.assert_close(static.rollout_logprobs, growing.rollout_logprobs, rtol=0, atol=PARITY)
    assert sampler.difference(static) < PARITY


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    calls, original = list[Any](), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: (calls.append(args), original(*args))[1])
    return calls


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gemma2", "DynamicSlidingWindowLayer"),
        ("paligemma", "transformers has no static cache for PaliGemma"),
        ("bloom", "does not take a mask of the cache"),
    ],
)
def test_a_model_without_passes_of_fixed_shapes_is_refused(make: Make, kind: str, reason: str) -> None:
    sampler = make(kind)
    sampler.component.settings = replace(sampler.component.settings, cache_implementation="static")
    with pytest.raises(InputError, match=reason) as refused:
        sampler.draw_all()
    assert refused.value.place == "rollout.cache_implementation"


@pytest.mark.parametrize(("kind", "reason"), [("gemma2", "DynamicSlidingWindowLayer"), ("llama", None)])
def test_a_static_cache_is_refused_by_the_configuration_alone(make: Make, kind: str, reason: str | None) -> None:
    model = make(kind).model
    expected: Any = nullcontext() if reason is None else pytest.raises(InputError, match=reason)
    with expected:
        refuse_static_cache(model.config, type(model).__name__)


def ids_of(tokens: TokenBatch, row: int) -> list[int]:
    ids: list[int] = tokens.token_ids[row, tokens.loss_mask[row]].tolist()
    return ids


@pytest.mark.parametrize("kind", ["llama", "qwen2_5_vl", "wide codes"])
def test_a_prompt_that_comes_twice_is_sampled_twice_and_siblings_differ_by_seed(drawn: Drawn, kind: str) -> None:
    sampler, _ = drawn(kind, "whole distribution")
    tokens = sampler.draw([0, 1, 0], 2, [5, 6, 7, 8, 5, 6]).actions
    first, second = sampler.prompts[:2]
    assert tokens.prompts == (first, first, second, second, first, first)
    assert torch.equal(tokens.token_ids[:2], tokens.token_ids[4:])
    assert not torch.equal(tokens.token_ids[0], tokens.token_ids[1])


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("llama", range(269, HEAD_ROWS)),
        ("qwen2_vl", None),
        ("gemma3", None),
        ("square codes", range(73, 88)),
    ],
)
@pytest.mark.parametrize("top_k", [0, 50])
def test_ids_that_cannot_be_sampled_are_never_drawn_and_have_no_mass(
    make: Make, kind: str, ids: Sequence[int] | None, top_k: int
) -> None:
    """Padding of the head, placeholders of images, end and text ids of a model of codes: here they are likeliest."""
    sampler = make(kind, top_k=top_k)
    never = torch.tensor(list(sampler.component.placeholders.ids if ids is None else ids))

    def raised(module: object, inputs: object, logits: Tensor) -> Tensor:
        return logits.index_add(-1, never, logits.new_full((*logits.shape[:-1], len(never)), 50.0))

    with torch.no_grad():
        sampler.model.get_output_embeddings().register_forward_hook(raised)
        sampled = sampler.draw_all()
    assert not torch.isin(sampled.actions.token_ids, never).any()
    assert float(sampled.rollout_logprobs.mean()) > -8
    if top_k:
        assert sampled.actions.support is not None
        assert not torch.isin(sampled.actions.support.ids, never).any()
    assert sampler.difference(sampled) < PARITY


# --- transformers as the oracle


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *((kind, 1) for kind in CONFIGS),
        *((kind, 2) for kind in ("qwen2_5_vl", "llava_onevision", "idefics3")),
        ("wide codes", 1),
        ("tall codes", 2),
    ],
)
def test_greedy_tokens_are_those_of_generate(drawn: Drawn, kind: str, place: int) -> None:
    """At a temperature of nearly zero the likeliest id is drawn."""
    sampler, sampled = drawn(kind, "greedy")
    inputs, component = own_inputs(sampler, place), sampler.component
    time, codes = component.max_length, kind in GRIDS
    never = component.placeholders.ids if kind in KINDS else range(component.vocabulary, sampler.head_ids)
    likeliest = sampler.model.generate(
        **inputs,
        do_sample=False,
        top_p=None,
        temperature=None,
        max_new_tokens=time,
        min_new_tokens=time if codes else None,
        pad_token_id=0,
        suppress_tokens=None if codes else list(never),
    )[0, inputs["input_ids"].shape[1] :]
    assert ids_of(sampled.actions, 3 * place) == likeliest.tolist()


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [*((kind, "warm") for kind in CONFIGS), *((kind, "whole distribution") for kind in KINDS), ("wide codes", "warm")],
)
@torch.no_grad()
def test_log_probs_are_those_of_the_models_own_passes_over_a_row_alone(drawn: Drawn, kind: str, sampling: str) -> None:
    sampler, sampled = drawn(kind, sampling)
    actions = sampled.actions
    for row in range(0, len(actions), 3):
        if kind in KINDS:
            expected = plain_logprobs(sampler.component, actions, row)
        else:
            logits = decoded if kind in GRIDS else whole_pass
            ids = actions.token_ids[row, actions.loss_mask[row]]
            found = logits(sampler, own_inputs(sampler, row // 3), ids)[:, : sampler.component.vocabulary]
            expected = (found.float() / 0.7).log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(sampled.rollout_logprobs[row, : len(expected)], expected, rtol=0, atol=PARITY)


# --- the ways to get them wrong


def _grids_swapped(given: dict[str, Any]) -> None:
    """Large grid first, as image_grid_thw lists them, in place of preview first."""
    positions, time = given["position_ids"], 10 + 32
    prompt = positions.shape[2] - (time - 1)
    preview, large = positions[:, :, prompt : prompt + 10], positions[:, :, prompt + 10 :]
    given["position_ids"] = torch.cat([positions[:, :, :prompt], large, preview], -1)


def _everything_attended(given: dict[str, Any]) -> None:
    given["attention_mask"] = torch.ones_like(given["attention_mask"])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param("wide codes", lambda given: given.pop("position_ids"), id="no positions of a grid"),
        pytest.param("wide codes", _grids_swapped, id="grids in the order of the processor"),
        pytest.param("wide codes", _everything_attended, id="no mask before codes"),
    ],
)
def test_the_gate_sees_each_known_mistake(make: Make, kind: str, change: Callable[[dict[str, Any]], object]) -> None:
    sampler = make(kind)
    sampled = sampler.draw_all()
    change_inputs(sampler.model, change)
    assert sampler.difference(sampled) > 0.5
    with pytest.raises(ParityError):
        gate(sampler, sampled, sampled.actions, ParityTolerance(1e-3, 1e-4))


@pytest.mark.parametrize("kind", ["llama", "wide codes"])
def test_the_gate_sees_another_temperature(drawn: Drawn, kind: str) -> None:
    sampler, sampled = drawn(kind, "warm")
    with pytest.raises(ParityError):
        gate(sampler, sampled, replace(sampled.actions, temperature=1.0), ParityTolerance(0.1, 0.01))
