"""References: how they are had, that they leave nothing behind, and their moving average by hand."""

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_core.errors import InputError
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.model import TrainedModel, exchanged
from grpo_core.policies.trained.settings import LoraSettings, Reference, TrainingChoice
from tests.grpo_core.policies.glm_image.test_memory import PeakBytes
from tests.grpo_core.policies.trained.tiny_models import disturb, logprobs, same, tiny_llama, values_of

LORA = TrainingChoice(LoraSettings(2, 4.0, "all-linear"))
KINDS = [
    pytest.param(LORA, id="adapters"),
    pytest.param(TrainingChoice(None, reference="device"), id="on the device"),
    pytest.param(TrainingChoice(None, reference="cpu"), id="in CPU memory"),
]


def trained(choice: TrainingChoice) -> TrainedModel:
    return train_model(tiny_llama(), choice, base_name="tiny")


def moved(choice: TrainingChoice) -> TrainedModel:
    """After training."""
    model = trained(choice)
    disturb(model.trainable_parameters())
    return model


@torch.no_grad()
def reference_logprobs(model: TrainedModel) -> torch.Tensor:
    with model.reference() as reference:
        return logprobs(reference)


@pytest.mark.parametrize("choice", KINDS)
def test_the_reference_is_the_model_before_training_and_leaves_no_trace(choice: TrainingChoice) -> None:
    plain = logprobs(tiny_llama())
    model = trained(choice)
    parameters = model.trainable_parameters()
    disturb(parameters)
    before, places = values_of(parameters), {name: value.data_ptr() for name, value in parameters.items()}
    moved = logprobs(model.model)
    assert torch.equal(reference_logprobs(model), plain)
    assert torch.equal(logprobs(model.model), moved)
    assert not torch.allclose(moved, plain, atol=0.1)
    after = model.trainable_parameters()
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert same(values_of(after), before)
    assert places == {name: value.data_ptr() for name, value in after.items()}
    with pytest.raises(ZeroDivisionError), model.reference():
        raise ZeroDivisionError
    assert same(values_of(model.trainable_parameters()), before)


@pytest.mark.parametrize("place", ["device", "cpu"])
def test_a_reference_is_one_copy_of_what_is_trained_inside_and_outside(place: Reference) -> None:
    """Only the trained part is copied, and entering makes no further copy."""
    base = tiny_llama()
    start = {name: value.clone() for name, value in base.state_dict().items()}
    choice = TrainingChoice(None, reference=place, frozen=r"model\.embed_tokens\.weight")
    with PeakBytes([*base.parameters(), *base.buffers(), *start.values()]) as watched:
        model = train_model(base, choice, base_name="tiny", initial_state=lambda: start)
        copied = sum(parameter.nbytes for parameter in model.trainable_parameters().values())
        gc.collect()
        assert watched.alive == copied
        with model.reference():
            assert watched.alive == copied
        assert watched.alive == copied


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_a_reference_in_cpu_memory_takes_no_gpu_memory() -> None:
    model = train_model(tiny_llama().cuda(), TrainingChoice(None, reference="cpu"), base_name="tiny")
    before = torch.cuda.memory_allocated()
    disturbed = values_of(model.trainable_parameters())
    held = torch.cuda.memory_allocated()
    with model.reference():
        assert torch.cuda.memory_allocated() == held
    assert same(values_of(model.trainable_parameters()), disturbed)
    del disturbed
    assert torch.cuda.memory_allocated() == before


def test_without_a_reference_it_cannot_be_asked() -> None:
    model = trained(TrainingChoice(None))
    assert not model.has_reference
    with pytest.raises(ValueError, match="no reference is kept"), model.reference():
        pass
    with pytest.raises(ValueError, match="no reference is kept"):
        model.reference_copy()


# --- the moving average


@pytest.mark.parametrize("choice", KINDS[1:])
def test_an_average_of_full_weights_in_16_bits_is_refused_and_a_copy_is_not(choice: TrainingChoice) -> None:
    model = train_model(tiny_llama().bfloat16(), choice, base_name="tiny")
    for average in (lambda: model.keep("ema"), lambda: model.reference_copy().mix(0.9)):
        with pytest.raises(InputError) as refused:
            average()
        assert (refused.value.place, refused.value.value) == ("policy.dtype", "bfloat16")
    assert "ema" not in model.copies
    model.keep("old")
    kept = values_of(model.copies["old"].values)
    disturb(model.trainable_parameters())
    with model.copies["old"].use():
        assert same(values_of(model.trainable_parameters()), kept)
    model.reference_copy().mix(1.0)
    assert same(model.reference_copy().values, values_of(model.trainable_parameters()))


def test_an_average_of_adapters_in_a_model_of_16_bits_moves_by_small_steps() -> None:
    model = train_model(tiny_llama().bfloat16(), LORA, base_name="tiny")
    with torch.no_grad():
        for parameter in model.trainable_parameters().values():
            parameter.fill_(1.0)
        model.keep("ema")
        for parameter in model.trainable_parameters().values():
            parameter.fill_(2.0)
    for _ in range(10):
        model.copies["ema"].mix(0.001)
    # In bfloat16 1.001 is 1.
    for value in model.copies["ema"].values.values():
        torch.testing.assert_close(value, torch.full_like(value, 2 - 0.999**10), rtol=1e-6, atol=0)


@pytest.mark.parametrize("choice", KINDS[:2])
def test_an_average_follows_the_policy_and_is_stored_like_it(choice: TrainingChoice, tmp_path: Path) -> None:
    model = trained(choice)
    (tmp_path / "average").mkdir()

    def make(value: float) -> None:
        with torch.no_grad():
            for parameter in model.trainable_parameters().values():
                parameter.fill_(value)

    make(1.0)
    model.keep("ema")
    for value in (2.0, 4.0):
        make(value)
        model.copies["ema"].mix(0.25)
    model.copies["ema"].save(tmp_path / "average")
    # 0.75 x 1 + 0.25 x 2 = 1.25, then 0.75 x 1.25 + 0.25 x 4 = 1.9375.
    model.keep("ema", tmp_path / "average")
    make(8.0)
    model.copies["ema"].mix(0.5)
    (tmp_path / "next").mkdir()
    model.copies["ema"].save(tmp_path / "next")
    assert {float(value) for each in values_of(model.trainable_parameters()).values() for value in each.unique()} == {8}
    for folder, expected in (("average", 1.9375), ("next", 4.96875)):
        (file,) = (tmp_path / folder).glob("*.safetensors")
        assert {float(value) for each in load_file(file).values() for value in each.unique()} == {expected}


@pytest.mark.parametrize("mix", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(mix: float) -> None:
    model = trained(LORA)
    with pytest.raises(ValueError, match="the share is"):
        model.reference_copy().mix(mix)


@pytest.mark.parametrize("choice", KINDS)
def test_a_refreshed_reference_is_the_average_of_weights(choice: TrainingChoice) -> None:
    model = trained(choice)
    start = values_of(model.trainable_parameters())
    disturb(model.trainable_parameters())
    first = values_of(model.trainable_parameters())
    model.reference_copy().mix(0.6)
    disturb(model.trainable_parameters(), seed=6)
    second = values_of(model.trainable_parameters())
    model.reference_copy().mix(0.25)
    found = reference_logprobs(model)
    assert same(values_of(model.trainable_parameters()), second)

    oracle = trained(choice)
    with torch.no_grad():
        for name, parameter in oracle.trainable_parameters().items():
            parameter.copy_(0.25 * second[name] + 0.75 * (0.6 * first[name] + 0.4 * start[name]))
    torch.testing.assert_close(found, logprobs(oracle.model), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, logprobs(model.model), atol=0.02)


@pytest.mark.parametrize("choice", KINDS)
def test_a_refreshed_reference_is_stored_and_comes_back_to_the_bit(choice: TrainingChoice, tmp_path: Path) -> None:
    """A whole share makes it the policy; loading nothing makes it the initial one."""
    model, plain = moved(choice), logprobs(tiny_llama())
    model.reference_copy().mix(1.0)
    then, before = logprobs(model.model), values_of(model.trainable_parameters())
    model.reference_copy().save(tmp_path)
    assert same(values_of(model.trainable_parameters()), before)
    disturb(model.trainable_parameters(), seed=6)
    other = trained(choice)
    other.load_reference(tmp_path)
    assert torch.equal(logprobs(other.model), plain)
    # Both continue alike.
    disturb(other.trainable_parameters())
    disturb(other.trainable_parameters(), seed=6)
    for each in (model, other):
        assert torch.equal(reference_logprobs(each), then)
        each.reference_copy().mix(0.5)
    assert torch.equal(reference_logprobs(other), reference_logprobs(model))
    model.load_reference(None)
    assert torch.equal(reference_logprobs(model), plain)


@pytest.mark.parametrize("choice", KINDS)
def test_a_reference_of_another_model_is_refused_whole(choice: TrainingChoice, tmp_path: Path) -> None:
    other = TrainingChoice(LoraSettings(3, 4.0, "all-linear")) if choice.lora else TrainingChoice(None)
    base = tiny_llama()
    if not choice.lora:
        base.resize_token_embeddings(40)
    train_model(base, other, base_name="tiny").save(tmp_path)
    model = moved(choice)
    model.reference_copy().mix(0.6)
    reference, policy = reference_logprobs(model), logprobs(model.model)
    with pytest.raises(InputError) as caught:
        model.load_reference(tmp_path)
    assert caught.value.place == ("policy.lora" if choice.lora else "policy")
    assert torch.equal(reference_logprobs(model), reference)
    assert torch.equal(logprobs(model.model), policy)


# --- exchange


def test_a_graph_over_weights_that_were_exchanged_cannot_be_run_backwards() -> None:
    """Its gradients would be of a mixture."""
    weight, other = torch.nn.Parameter(torch.tensor([2.0])), {"w": torch.tensor([5.0])}
    loss = (weight * weight).sum()
    with exchanged({"w": weight}, other):
        assert weight.item() == 5.0
    assert (weight.item(), other["w"].item()) == (2.0, 5.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_open_autocast_does_not_keep_the_previous_weights() -> None:
    """It rounds a weight once, and would use that again."""
    weight, other = torch.nn.Parameter(torch.eye(2)), {"w": 5 * torch.eye(2)}
    x = torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ weight).tolist() == [[1.0, 1.0]]
        with exchanged({"w": weight}, other):
            assert (x @ weight).tolist() == [[5.0, 5.0]]
        assert (x @ weight).tolist() == [[1.0, 1.0]]


def test_values_can_be_held_in_another_form() -> None:
    """In fp64 they are the same values; adapters that are switched off have none."""
    model = trained(TrainingChoice(None, reference="device"))
    before = reference_logprobs(model)
    names = []

    def widen(name: str, value: torch.Tensor) -> torch.Tensor:
        names.append(name)
        return value.double()

    model.copies["reference"].change(widen)
    assert names == list(model.trainable_parameters())
    disturb(model.trainable_parameters())
    assert torch.equal(reference_logprobs(model), before)
    assert not trained(LORA).copies
