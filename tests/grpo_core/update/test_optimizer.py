"""Optimizers and their groups against torch and transformers' Trainer; state goes on to the bit for every kind."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.loading import train_language_model
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.update.optimizer import PolicyOptimizer, refuse_unavailable
from grpo_core.update.optimizer_kinds import OptimizerKind
from grpo_core.update.settings import OptimizerSettings
from tests.grpo_core.policies.causal_lm.model_types import make_model
from tests.grpo_core.policies.trained.tiny_models import tiny_opt, values_of
from tests.grpo_core.policies.vision_lm import tiny_families
from tests.tiny_policies import MODEL

WARM = OptimizerSettings(
    1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, lr_scheduler="constant_with_warmup", warmup_steps=4
)
FALLING = replace(WARM, lr_scheduler="cosine", warmup_steps=2, total_steps=7)
EIGHT_BIT = replace(WARM, optimizer="adamw_8bit")
# The embedding is large enough for 8 bits, and its last block is not full.
SHAPES = {"a|b": (3, 4), "bias": (5,), "embedding": (67, 64)}


def parameters(device: str = "cpu", shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(device)) for name, shape in shapes.items()}


def give_gradients(trained: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in trained.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)


def run(optimizer: PolicyOptimizer, steps: range) -> dict[str, Tensor]:
    for step in steps:
        give_gradients(optimizer.parameters, step)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in optimizer.parameters.items()}


def resumed(
    settings: OptimizerSettings, stop: int, end: int, file: Path, device: str = "cpu", **shapes: tuple[int, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after `end` steps: without a break, and with one after `stop` of them."""
    made = shapes or SHAPES
    uninterrupted = run(PolicyOptimizer(parameters(device, made), settings), range(end))
    first = PolicyOptimizer(parameters(device, made), settings)
    weights = run(first, range(stop))
    save_file(first.state(), file)
    second = PolicyOptimizer({name: nn.Parameter(value) for name, value in weights.items()}, settings, steps=stop)
    second.load_state(load_file(file))
    assert second.learning_rate == first.learning_rate
    return uninterrupted, run(second, range(stop, end))


def test_steps_are_those_of_torch_adamw_under_a_hand_made_warm_up() -> None:
    """The rate of step k (from 0) is learning_rate * min(k / 4, 1)."""
    plain = parameters()
    oracle = torch.optim.AdamW(plain.values(), lr=0.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(7):
        oracle.param_groups[0]["lr"] = 1e-2 * min(step / 4, 1.0)
        give_gradients(plain, step)
        oracle.step()
    ours = run(PolicyOptimizer(parameters(), WARM), range(7))
    assert all(torch.equal(ours[name], value) for name, value in plain.items())


def test_8_bit_steps_are_close_to_exact_ones_and_no_more() -> None:
    """Small parameters keep moments in fp32, and differ by rounding; quantised moments differ visibly."""
    exact = run(PolicyOptimizer(parameters(), WARM), range(8))
    rounded = run(PolicyOptimizer(parameters(), EIGHT_BIT), range(8))
    torch.testing.assert_close(rounded["a|b"], exact["a|b"], rtol=1e-5, atol=1e-6)
    difference = (rounded["embedding"] - exact["embedding"]).abs()
    moved = (exact["embedding"] - parameters()["embedding"]).abs()
    assert 1e-5 < difference.mean() < 0.1 * moved.mean()


MATRICES = {"a": (3, 4), "wide": (4, 67), "table": (67, 64)}
PLAIN = OptimizerSettings(1e-2, weight_decay=0.1)
OTHERS: Mapping[str, tuple[OptimizerSettings, Callable[..., torch.optim.Optimizer] | None]] = {
    "sgd": (
        replace(PLAIN, optimizer="sgd", optimizer_kwargs={"momentum": 0.8, "nesterov": True}),
        lambda given: torch.optim.SGD(given, lr=1e-2, weight_decay=0.1, momentum=0.8, nesterov=True),
    ),
    "sgd, plain": (
        replace(PLAIN, optimizer="sgd", optimizer_kwargs={"momentum": 0.0}),
        lambda given: torch.optim.SGD(given, lr=1e-2, weight_decay=0.1),
    ),
    "adafactor": (
        replace(PLAIN, optimizer="adafactor", optimizer_kwargs={"d": 2.0}),
        lambda given: torch.optim.Adafactor(given, lr=1e-2, weight_decay=0.1, d=2.0),
    ),
    "muon": (
        replace(PLAIN, optimizer="muon"),
        lambda given: torch.optim.Muon(given, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ),
    # bitsandbytes' own steps: below, by hand.
    "lion": (replace(PLAIN, optimizer="lion"), None),
    "lion_8bit": (replace(PLAIN, optimizer="lion_8bit"), None),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_optimizer_steps_as_its_class_and_goes_on_from_its_state(kind: str, tmp_path: Path) -> None:
    settings, oracle = OTHERS[kind]
    shapes = MATRICES if kind == "muon" else SHAPES
    unbroken, continued = resumed(settings, 3, 6, tmp_path / "state.safetensors", **shapes)
    assert all(torch.equal(continued[name], value) for name, value in unbroken.items())
    if oracle is not None:
        plain = parameters(shapes=shapes)
        optimizer = oracle(plain.values())
        for step in range(6):
            give_gradients(plain, step)
            optimizer.step()
        assert all(torch.equal(unbroken[name], value) for name, value in plain.items())


def test_lion_moves_by_the_sign_of_a_mean_of_gradient_and_momentum() -> None:
    """c = b1 m + (1 - b1) g; p -= lr (sign c + decay p); m = b2 m + (1 - b2) g (Chen et al., algorithm 2)."""
    settings = replace(PLAIN, optimizer="lion", betas=(0.8, 0.95))
    by_hand = parameters()
    momentum = {name: torch.zeros_like(value) for name, value in by_hand.items()}
    for step in range(4):
        give_gradients(by_hand, step)
        for name, value in by_hand.items():
            assert value.grad is not None
            towards = (0.8 * momentum[name] + 0.2 * value.grad).sign()
            value.data -= 1e-2 * (towards + 0.1 * value.data)
            momentum[name] = 0.95 * momentum[name] + 0.05 * value.grad
    ours = run(PolicyOptimizer(parameters(), settings), range(4))
    for name, value in by_hand.items():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"optimizer": "sgd", "betas": (0.9, 0.99)}, "update.betas"),
        ({"optimizer": "lion", "eps": 1e-6}, "update.eps"),
        ({"optimizer": "sgd", "optimizer_kwargs": {"betas": 0.9}}, "update.optimizer_kwargs.betas"),
        ({"optimizer_kwargs": {"momentum": 0.9}}, "update.optimizer_kwargs.momentum"),
        ({"optimizer": "sgd", "optimizer_kwargs": {"momentum": -1.0}}, "update.optimizer_kwargs"),
        ({"optimizer": "muon", "optimizer_kwargs": {"adjust_lr_fn": "adam"}}, "update.optimizer_kwargs"),
    ],
)
def test_settings_that_an_optimizer_does_not_have(changed: dict[str, Any], place: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(PLAIN, **changed)
    assert caught.value.place == place


def test_muon_refuses_what_is_no_matrix() -> None:
    with pytest.raises(InputError, match="bias is \\[5\\]"):
        PolicyOptimizer(parameters(), OTHERS["muon"][0])


@pytest.mark.parametrize("stop", [1, 6])
@pytest.mark.parametrize(
    "settings",
    [WARM, OptimizerSettings(1e-2), FALLING, EIGHT_BIT, replace(FALLING, optimizer="adamw_8bit")],
    ids=["warm-up", "constant", "cosine", "8 bits", "8 bits, cosine"],
)
def test_stepping_after_save_and_load_is_stepping_on(stop: int, settings: OptimizerSettings, tmp_path: Path) -> None:
    unbroken, continued = resumed(settings, stop, 8, tmp_path / "state.safetensors")
    assert all(torch.equal(continued[name], value) for name, value in unbroken.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pages are CUDA's")
@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_stepping_on_is_exact_on_a_gpu(kind: OptimizerKind, tmp_path: Path) -> None:
    """The table is large enough to be paged."""
    settings = replace(WARM, optimizer=kind)
    unbroken, continued = resumed(settings, 3, 6, tmp_path / "state.safetensors", "cuda", bias=(5,), table=(400, 512))
    assert all(torch.equal(continued[name], value) for name, value in unbroken.items())


@pytest.mark.parametrize("settings", [WARM, EIGHT_BIT], ids=["exact", "8 bits"])
def test_a_loaded_state_is_a_copy(settings: OptimizerSettings) -> None:
    first, second = PolicyOptimizer(parameters(), settings), PolicyOptimizer(parameters(), settings)
    run(first, range(2))
    state = first.state()
    before = {name: value.clone() for name, value in state.items()}
    second.load_state(state)
    run(second, range(2, 4))
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_a_parameter_that_never_had_a_gradient_stays_without_moments() -> None:
    first = PolicyOptimizer(parameters(), WARM)
    first.parameters["bias"].grad = torch.ones(5)
    first.step()
    second = PolicyOptimizer(parameters(), WARM, steps=1)
    second.load_state(first.state())
    assert second.state().keys() == first.state().keys()
    assert sorted(name for name in second.state() if name.startswith("embedding")) == ["embedding|none"]


# --- states that are for something else


def test_a_state_for_other_parameters_is_refused() -> None:
    optimizer = PolicyOptimizer(parameters(), WARM)
    with pytest.raises(ValueError, match="lm_head"):
        optimizer.load_state({**optimizer.state(), "lm_head|exp_avg": torch.zeros(1)})


@pytest.mark.parametrize(("trained", "requested"), [(WARM, EIGHT_BIT), (EIGHT_BIT, WARM)], ids=["exact", "8 bits"])
def test_a_state_of_another_optimizer_is_refused_with_both_names(
    trained: OptimizerSettings, requested: OptimizerSettings
) -> None:
    first, second = PolicyOptimizer(parameters(), trained), PolicyOptimizer(parameters(), requested, steps=2)
    run(first, range(2))
    with pytest.raises(InputError) as caught:
        second.load_state(first.state())
    assert (caught.value.place, caught.value.value) == ("update.optimizer", requested.optimizer)
    assert trained.optimizer in caught.value.hint


def _without(entry: str) -> Callable[[dict[str, Tensor]], None]:
    def damage(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if name.startswith(entry)]:
            del state[name]

    return damage


def _changed(entry: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def damage(state: dict[str, Tensor]) -> None:
        state[entry] = change(state[entry])

    return damage


@pytest.mark.parametrize(
    ("settings", "damage", "message"),
    [
        (WARM, _without("bias|exp_avg"), "bias"),
        (WARM, _without("bias|step"), "bias"),
        (WARM, _without("bias"), "bias"),
        (WARM, _without("|optimizer"), "optimizer"),
        (WARM, _changed("bias|exp_avg", lambda moment: moment[:2]), "bias"),
        (WARM, _changed("bias|exp_avg", Tensor.bfloat16), "bias"),
        (EIGHT_BIT, _without("embedding|qmap2"), "embedding"),
        (EIGHT_BIT, _without("embedding"), "embedding"),
        (EIGHT_BIT, _changed("embedding|state1", Tensor.float), "embedding"),
        (EIGHT_BIT, _changed("embedding|absmax1", lambda scales: scales[:-1]), "embedding"),
        (EIGHT_BIT, _changed("bias|state2", lambda moment: moment.to(torch.uint8)), "bias"),
    ],
    ids=[
        "moment", "step", "parameter", "kind", "shape", "dtype",
        "8-bit codes", "8-bit parameter", "8-bit dtype", "8-bit blocks", "8-bit small",
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused_whole(
    settings: OptimizerSettings, damage: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    first = PolicyOptimizer(parameters(), settings)
    run(first, range(2))
    state = first.state()
    damage(state)
    second = PolicyOptimizer(parameters(), settings, steps=2)
    before = second.state()
    with pytest.raises(ValueError, match=message):
        second.load_state(state)
    assert second.state().keys() == before.keys()


def test_an_empty_state_after_steps_is_refused() -> None:
    fresh = PolicyOptimizer(parameters(), WARM).state()
    PolicyOptimizer(parameters(), WARM).load_state(fresh)
    with pytest.raises(ValueError, match="2 steps"):
        PolicyOptimizer(parameters(), WARM, steps=2).load_state(fresh)


# --- optimizers that this machine cannot run


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    PolicyOptimizer(parameters(), WARM)
    with pytest.raises(InputError) as caught:
        PolicyOptimizer(parameters(), EIGHT_BIT)
    assert (caught.value.place, caught.value.value) == ("update.optimizer", "adamw_8bit")
    assert "pip install bitsandbytes" in caught.value.hint


@pytest.mark.parametrize("kind", ["paged_adamw", "paged_adamw_8bit"])
def test_pages_are_refused_on_the_cpu(kind: OptimizerKind) -> None:
    """bitsandbytes would go on without them."""
    with pytest.raises(InputError) as caught:
        PolicyOptimizer(parameters(), replace(WARM, optimizer=kind))
    assert (caught.value.place, caught.value.value) == ("update.optimizer", kind)
    refuse_unavailable(kind, torch.device("cuda"))


def test_moments_in_cpu_memory_change_no_bit() -> None:
    """Also where a parameter has no gradient at first, and over a stored state of either kind."""
    offloaded = replace(WARM, offload_optimizer=True)
    plain, apart = (PolicyOptimizer(parameters(), each) for each in (WARM, offloaded))
    for optimizer in (plain, apart):
        give_gradients(optimizer.parameters, 0)
        optimizer.parameters["bias"].grad = None
        optimizer.step()
    assert all(torch.equal(value, apart.state()[name]) for name, value in plain.state().items())
    both = [run(optimizer, range(1, 4)) for optimizer in (plain, apart)]
    exchanged = [
        PolicyOptimizer(values, each, steps=4)
        for values, each in zip(map(_fresh, both), (offloaded, WARM), strict=True)
    ]
    for optimizer, state in zip(exchanged, (plain.state(), apart.state()), strict=True):
        optimizer.load_state(state)
    both += [run(optimizer, range(4, 6)) for optimizer in exchanged]
    for one, other in (both[:2], both[2:]):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    # A step leaves no moments behind where the parameters are.
    exchanged[0].zero_grad()
    assert not any(each.state for each in exchanged[0]._optimizer._optimizers.values())


def _fresh(values: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value.clone()) for name, value in values.items()}


MODELS: Mapping[str, Callable[[], Any]] = {
    **{kind: lambda kind=kind: make_model(kind) for kind in ("llama", "qwen2", "gpt2", "bloom")},
    "opt": lambda: tiny_opt(0.0),
    **{kind: lambda kind=kind: tiny_families.make_model(kind)[0] for kind in ("qwen2_vl", "qwen3_vl", "gemma3")},
    "sd3": lambda: SD3Transformer2DModel.from_pretrained(MODEL.with_name("tiny-sd3") / "transformer"),
}


def trainer_names(model: nn.Module) -> set[str]:
    trainer: Any = None
    return {*Trainer.get_decay_parameter_names(trainer, model)}


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_weights_decay_as_in_transformers_trainer(kind: str) -> None:
    trained = train_model(MODELS[kind](), TrainingChoice(None), base_name="")
    names = {*trained.trainable_parameters()}
    undecayed = trained.undecayed_parameters()
    assert names - undecayed == names & trainer_names(trained.model)
    assert 0 < len(undecayed) < len(names)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_adapters_decay_and_norms_that_are_trained_whole_do_not(kind: str) -> None:
    norm = {"llama": "norm", "gpt2": "ln_f", "opt": "final_layer_norm"}[kind]
    choice = TrainingChoice(LoraSettings(rank=2, modules_to_save=(norm,)))
    trained: TrainedModel = train_language_model(MODELS[kind](), choice, base_name="")
    names, undecayed = {*trained.trainable_parameters()}, trained.undecayed_parameters()
    assert names - undecayed == names & trainer_names(trained.model)
    assert not any("lora" in name for name in undecayed)
    assert undecayed


@pytest.mark.parametrize("offload", [False, True])
def test_steps_are_those_of_adamw_with_the_trainers_groups(offload: bool) -> None:
    trained = train_model(make_model("qwen2"), TrainingChoice(None), base_name="")
    parameters = trained.trainable_parameters()
    start = values_of(parameters)
    decayed = trainer_names(trained.model)
    plain = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    groups = [
        {"params": [each for name, each in plain.items() if (name in decayed) == decays], "weight_decay": 0.3 * decays}
        for decays in (True, False)
    ]
    oracle = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    settings = OptimizerSettings(1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.3, offload_optimizer=offload)
    optimizer = PolicyOptimizer(parameters, settings, undecayed=trained.undecayed_parameters())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in parameters.items():
            plain[name].grad = parameter.grad = torch.randn(parameter.shape, generator=generator)
        oracle.step()
        optimizer.step()
        if step == 0:
            # A state has no groups: what was stored before goes on.
            again = PolicyOptimizer(parameters, settings, steps=1, undecayed=trained.undecayed_parameters())
            again.load_state(optimizer.state())
            optimizer = again
    assert all(torch.equal(parameter, plain[name]) for name, parameter in parameters.items())
