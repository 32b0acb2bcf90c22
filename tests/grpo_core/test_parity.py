"""In 16 bits the gate lets rounding through at every depth and entropy, and refuses log-probs of something else."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo_core.errors import NonFiniteError
from grpo_core.parity import (
    BF16,
    ParityError,
    ParityReport,
    ParityTolerance,
    compare_logprobs,
    likely_cause,
    measure_parity,
    of_rounding,
    require_parity,
    share_of_tolerance,
)
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.records import SampledTokens
from tasks.runs.signs import NEAR_GATE
from tests.grpo_core.policies.causal_lm.model_types import make_tokenizer
from tests.grpo_core.policies.trained.tiny_models import disturb
from tests.tiny_policies import TEXT_PROMPTS, build_text_policy

# Blocks, width, deviation of the logits, temperature: from 5 nats to a quarter of one.
MODELS: Mapping[str, tuple[int, int, float, float]] = {
    "hardly any difference between ids": (2, 64, 1.0, 1.0),
    "3 nats": (2, 64, 2.5, 1.0),
    "2 nats": (2, 64, 3.5, 1.0),
    "cold": (2, 64, 3.5, 0.4),
    "deep, 3 nats": (12, 64, 2.5, 1.0),
    "deep, cold": (12, 64, 3.5, 0.4),
    "wide, 2 nats": (6, 256, 3.5, 1.0),
    "wide, cold": (6, 256, 3.5, 0.3),
}

LARGER = ("deep, 3 nats", "deep, cold", "wide, 2 nats", "wide, cold")


def sampled_in_16_bits(kind: str, **settings: Any) -> tuple[CausalLMPolicy, SampledTokens]:
    blocks, width, size, temperature = MODELS[kind]
    config = LlamaConfig(
        vocab_size=269,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=width**-0.5 / 2,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
        model.lm_head.weight.mul_(size / (model.lm_head.weight.std() * math.sqrt(width)))
    made = CausalLMSettings(max_completion_length=16, temperature=temperature, chat_template=False, **settings)
    policy = build_text_policy(
        made, model=model.to(torch.bfloat16), tokenizer=make_tokenizer(), choice=TrainingChoice(None)
    )
    policy.ends = ()
    return policy, policy.sample_tokens(TEXT_PROMPTS, group_size=6, seeds=range(6 * len(TEXT_PROMPTS)))


def tolerance_of(policy: CausalLMPolicy, sampled: SampledTokens) -> ParityTolerance:
    actions = sampled.actions
    stored = sampled.rollout_logprobs[actions.loss_mask]
    return of_rounding(
        stored, blocks=policy.blocks, vocabulary=policy.vocabulary, temperature=actions.temperature, unit=BF16
    )


@torch.no_grad()
def compared(policy: CausalLMPolicy, sampled: SampledTokens, scored: Any = None) -> ParityReport:
    """The stored log-probs beside those of the same actions, or of others."""
    actions = sampled.actions
    found = policy.logprobs(actions if scored is None else scored).logprobs
    names = [str(row) for row in range(len(actions))]
    return measure_parity(names, sampled.rollout_logprobs, found, actions.loss_mask)


@pytest.mark.parametrize("kind", MODELS)
def test_rounding_passes_without_a_sign(kind: str) -> None:
    policy, sampled = sampled_in_16_bits(kind)
    report, tolerance = compared(policy, sampled), tolerance_of(policy, sampled)
    require_parity(report, tolerance)
    assert 0 < share_of_tolerance(report, tolerance) < NEAR_GATE


def _other_adapter(policy: CausalLMPolicy, sampled: SampledTokens) -> Any:
    disturb(policy.trainable_parameters(), 0.05)
    return sampled.actions


def _shifted(policy: CausalLMPolicy, sampled: SampledTokens) -> Any:
    return replace(sampled.actions, token_ids=sampled.actions.token_ids.roll(1, 1))


MISTAKES: Mapping[str, Callable[[CausalLMPolicy, SampledTokens], Any]] = {
    "another temperature": lambda policy, sampled: replace(
        sampled.actions, temperature=0.6 * sampled.actions.temperature
    ),
    "top_k ignored": lambda policy, sampled: replace(sampled.actions, support=None),
    "shifted tokens": _shifted,
    "other weights": _other_adapter,
}


@pytest.mark.parametrize(
    "kind", ["3 nats", "2 nats", "cold", *(pytest.param(each, marks=pytest.mark.slow) for each in LARGER)]
)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_log_probs_of_something_else_are_refused(kind: str, mistake: str) -> None:
    policy, sampled = sampled_in_16_bits(kind, top_k=2 if mistake == "top_k ignored" else 0)
    tolerance = tolerance_of(policy, sampled)
    report = compared(policy, sampled, MISTAKES[mistake](policy, sampled))
    with pytest.raises(ParityError, match=r"16 bits round about"):
        require_parity(report, tolerance)


def logprobs_of(mean: float) -> Tensor:
    return torch.full((1000,), -mean)


def test_the_tolerance_of_a_released_model_by_hand() -> None:
    """SmolLM2-135M at 2.46 nats, 30 blocks, 49,152 ids: .0445 on average and .37 at most were measured."""
    stored = torch.distributions.Exponential(1 / 2.46).icdf((torch.arange(1000) + 0.5) / 1000).neg()
    spread = math.sqrt(2 * (math.log(49152) + float(stored.mean())))
    uncertain = float((1 - stored.exp()).mean())
    found = of_rounding(stored, blocks=30, vocabulary=49152, temperature=1.0)
    assert found.rounding == pytest.approx(1.6 * 2**-9 * math.sqrt(30) * spread * uncertain)
    assert found.mean_difference == pytest.approx(3 * found.rounding)
    assert found.max_difference == pytest.approx(40 * 2**-9 * math.sqrt(30) * spread)
    assert 2 < found.mean_difference / 0.0445 < 4
    assert 2 < found.max_difference / 0.37 < 8


def test_the_tolerance_grows_with_depth_and_vocabulary_and_falls_with_certainty() -> None:
    def allowed(mean: float = 1.0, blocks: int = 16, vocabulary: int = 50_000, temperature: float = 1.0) -> float:
        found = of_rounding(logprobs_of(mean), blocks=blocks, vocabulary=vocabulary, temperature=temperature)
        return found.mean_difference

    assert allowed(blocks=64) == pytest.approx(2 * allowed())
    assert allowed(vocabulary=150_000) > allowed()
    assert allowed(0.1) < allowed(0.5) < allowed(1.0)
    assert allowed(temperature=0.5) == pytest.approx(2 * allowed())
    assert allowed(temperature=2.0) == allowed()


def test_single_tokens_beyond_are_called_rounding() -> None:
    stored = logprobs_of(1.0)
    tolerance = of_rounding(stored, blocks=16, vocabulary=50_000, temperature=1.0)
    apart = torch.full((1000,), tolerance.rounding)
    apart[0] = 2 * tolerance.max_difference
    names = [str(row) for row in range(2)]
    report = measure_parity(
        names, stored.view(2, -1), (stored + apart).view(2, -1), torch.ones(2, 500, dtype=torch.bool)
    )
    with pytest.raises(ParityError, match="rounding in 16 bits"):
        require_parity(report, tolerance)
    assert "rounding" not in likely_cause(replace(report, mean_difference=1.0), tolerance)


def test_rows_one_after_another_are_compared_each() -> None:
    """Rows of two, no and one token; the last one's log-prob is broken then."""
    stored, counts = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([2, 0, 1])
    found = torch.tensor([-1.5, -2.25, -2.75])
    report = compare_logprobs("abc", stored, found, counts, limit=0.3)
    assert (report.max_difference, report.mean_difference, report.tokens_beyond) == (0.5, pytest.approx(1 / 3), 1)
    assert (report.tokens, report.rows, report.rows_apart) == (3, 3, 2)
    assert (report.worst_samples, report.worst_differences) == (("a", "c", "b"), (0.5, 0.25, 0.0))
    with pytest.raises(NonFiniteError) as caught:
        compare_logprobs("abc", stored, torch.tensor([0.0, 0.0, torch.nan]), counts)
    assert caught.value.sample_ids == ("c",)
