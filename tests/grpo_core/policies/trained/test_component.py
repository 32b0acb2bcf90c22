"""Adapters merged for sampling: the same function, fewer products, and the base comes back to the bit."""

import pytest
import torch

from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from tests.grpo_core.policies.trained.tiny_models import disturb, logprobs, tiny_llama

EVERY_LINEAR = r".*(proj|lm_head)"


def adapted(
    targets: str, *, tied: bool = False, use_dora: bool = False, dtype: torch.dtype = torch.float64
) -> TrainedModel:
    choice = TrainingChoice(LoraSettings(4, 8.0, targets, use_dora=use_dora))
    trained = train_model(tiny_llama(tied=tied).to(dtype), choice, base_name="tiny")
    trained.model.to(dtype)
    disturb(trained.trainable_parameters())
    return trained


def multiplied(trained: TrainedModel) -> int:
    """Number of matrix products of weights in a forward pass."""
    counted = []
    linear = [each for each in trained.model.modules() if type(each) is torch.nn.Linear]
    hooks = [each.register_forward_hook(lambda *_: counted.append(1)) for each in linear]
    logprobs(trained.model)
    for hook in hooks:
        hook.remove()
    return len(counted)


@pytest.mark.parametrize(
    ("targets", "options", "merged_products"),
    [
        (EVERY_LINEAR, {}, 15),
        (EVERY_LINEAR, {"use_dora": True}, 75),
        (EVERY_LINEAR, {"tied": True}, 17),
        (EVERY_LINEAR, {"dtype": torch.bfloat16}, 45),
    ],
    ids=["all", "DoRA: none", "a tied head is left out", "16 bits: none"],
)
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_merged_adapters_compute_the_same_with_fewer_products(
    targets: str, options: dict[str, object], merged_products: int
) -> None:
    trained = adapted(targets, **options)  # type: ignore[arg-type]
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    expected = logprobs(trained.model)
    with trained.merged():
        assert multiplied(trained) == merged_products
        torch.testing.assert_close(logprobs(trained.model), expected, rtol=0, atol=1e-12)
    assert all(torch.equal(value, before[name]) for name, value in trained.model.state_dict().items())
    assert torch.equal(logprobs(trained.model), expected)


def test_weights_come_back_when_sampling_fails() -> None:
    trained = adapted(EVERY_LINEAR)
    expected = logprobs(trained.model)
    with pytest.raises(KeyboardInterrupt), trained.merged():
        raise KeyboardInterrupt
    assert torch.equal(logprobs(trained.model), expected)
