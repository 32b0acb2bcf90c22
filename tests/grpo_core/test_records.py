"""Records keep their rows together and refuse what does not fit."""

import pytest
import torch
from jaxtyping import TypeCheckError

from grpo_core.advantages import compute_advantages
from grpo_core.losses import k3_kl
from grpo_core.records import SampledTokens, TokenBatch, TrainingRows

IDS = torch.arange(6).reshape(3, 2)
MASK = torch.tensor([[True, True], [True, False], [True, True]])


def rows() -> TrainingRows:
    batch = TokenBatch(("a", "b", "c"), IDS, MASK, 0.9)
    return TrainingRows(("s0", "s1", "s2"), batch, -IDS.float(), torch.tensor([1.0, 2.0, 3.0]))


def test_selected_rows_stay_together_in_the_order_asked_for() -> None:
    chosen = rows().with_old_logprobs(IDS.float() * 2).select([2, 0, 2])
    assert chosen.sample_ids == ("s2", "s0", "s2")
    assert chosen.tokens.prompts == ("c", "a", "c")
    assert chosen.tokens.token_ids.tolist() == [[4, 5], [0, 1], [4, 5]]
    assert chosen.tokens.loss_mask.tolist() == [[True, True]] * 3
    assert chosen.tokens.temperature == 0.9
    assert chosen.rollout_logprobs.tolist() == [[-4.0, -5.0], [0.0, -1.0], [-4.0, -5.0]]
    assert chosen.advantages.tolist() == [3.0, 1.0, 3.0]
    assert chosen.old_logprobs is not None
    assert chosen.old_logprobs.tolist() == [[8.0, 10.0], [0.0, 2.0], [8.0, 10.0]]


def test_no_rows_can_be_selected() -> None:
    assert len(rows().select(range(0))) == 0


def test_old_log_probs_are_unknown_until_they_are_recomputed() -> None:
    assert rows().old_logprobs is None
    assert rows().select([1]).old_logprobs is None


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(AssertionError, match="temperature is positive"):
        TokenBatch(("a", "b", "c"), IDS, MASK, temperature)


def test_a_prompt_too_few_is_refused() -> None:
    with pytest.raises(AssertionError, match="one prompt a row"):
        TokenBatch(("a", "b"), IDS, MASK, 1.0)


def test_shapes_and_dtypes_of_signatures_are_checked_in_tests() -> None:
    """The import hook of tests/conftest.py is on: without it, broadcasting would let these pass."""
    with pytest.raises(TypeCheckError):
        k3_kl(torch.zeros(3, 2), torch.zeros(1, 2), MASK)
    with pytest.raises(TypeCheckError):
        compute_advantages(torch.zeros(2, 2, dtype=torch.long))
    with pytest.raises(TypeCheckError):
        SampledTokens(TokenBatch(("a", "b", "c"), IDS, MASK, 1.0), IDS)
