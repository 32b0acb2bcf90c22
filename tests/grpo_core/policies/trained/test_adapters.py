"""Adapters go to disk and back to the bit, peft reads them as they are, and merged ones compute the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from grpo_core.errors import InputError
from grpo_core.policies.trained.lora_and_full import WEIGHTS_FILE, train_model
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import ADAPTER_FILE, LoraSettings, TrainingChoice
from tests.grpo_core.policies.trained.tiny_models import disturb, logprobs, same, tiny_llama, values_of

LORA = LoraSettings(rank=4, alpha=8.0, targets=r".*_proj")
CHOICES = [pytest.param(LORA, id="adapters"), pytest.param(None, id="full weights")]


def trained(lora: LoraSettings | None, *, disturbed: bool = False) -> TrainedModel:
    model = train_model(tiny_llama(), TrainingChoice(lora), base_name="some/base")
    if disturbed:
        disturb(model.trainable_parameters())
    return model


def weights_of(model: TrainedModel) -> dict[str, torch.Tensor]:
    return values_of(model.trainable_parameters())


def test_saved_adapters_come_back_to_the_bit(tmp_path: Path) -> None:
    first, second = trained(LORA, disturbed=True), trained(LORA)
    first.save(tmp_path)
    start = weights_of(second)
    assert not same(weights_of(first), start)
    second.load(tmp_path)
    assert same(weights_of(first), weights_of(second))
    assert torch.equal(logprobs(first.model), logprobs(second.model))
    second.load(None)
    assert same(weights_of(second), start)


@pytest.mark.parametrize("lora", CHOICES)
def test_the_same_weights_are_the_same_bytes(lora: LoraSettings | None, tmp_path: Path) -> None:
    """A policy's digest is of its files."""
    name = WEIGHTS_FILE if lora is None else ADAPTER_FILE
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        trained(lora, disturbed=True).save(folder)
        written.append((folder / name).read_bytes())
    assert written[0] == written[1]


# peft asks transformers for an attribute by its previous name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(LORA, id="plain"),
        pytest.param(replace(LORA, use_dora=True, use_rslora=True, modules_to_save=("lm_head",)), id="dora and others"),
        pytest.param(replace(LORA, init_lora_weights="pissa"), id="pissa"),
        pytest.param(replace(LORA, init_lora_weights="olora"), id="olora"),
    ],
)
@torch.no_grad()
def test_peft_loads_the_adapter_as_it_is(lora: LoraSettings, tmp_path: Path) -> None:
    model = trained(lora, disturbed=True)
    model.save(tmp_path)
    base = tiny_llama()
    plain = logprobs(base)
    loaded = logprobs(PeftModel.from_pretrained(base, str(tmp_path)))
    assert torch.equal(loaded, logprobs(model.model))
    assert not torch.allclose(loaded, plain, atol=0.1)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8.0, "some/base")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", ADAPTER_FILE]


def test_an_adapter_names_the_revision_of_its_model_and_not_the_copy_here(tmp_path: Path) -> None:
    choice = TrainingChoice(LORA, hub=("organisation/model", "v1"))
    train_model(tiny_llama(), choice, base_name="a/local/copy").save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("organisation/model", "v1")


# --- weights that are for something else


def refused(model: TrainedModel, folder: Path, place: str) -> None:
    """The load is refused, and nothing of it was taken."""
    before = weights_of(model)
    with pytest.raises(InputError) as caught:
        model.load(folder)
    assert caught.value.place == place
    assert same(weights_of(model), before)


@pytest.mark.parametrize("other", [{"rank": 8}, {"rank": 2}, {"targets": r".*q_proj"}], ids=str)
def test_an_adapter_of_another_shape_is_refused_whole(other: dict[str, Any], tmp_path: Path) -> None:
    trained(LORA, disturbed=True).save(tmp_path)
    refused(trained(replace(LORA, **other)), tmp_path, "policy.lora")


@pytest.mark.parametrize("lora", CHOICES)
@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_weights_of_another_model_are_refused_whole(lora: LoraSettings | None, damage: str, tmp_path: Path) -> None:
    file = tmp_path / (WEIGHTS_FILE if lora is None else ADAPTER_FILE)
    trained(lora, disturbed=True).save(tmp_path)
    state = load_file(file)
    name = max(state)
    if damage == "missing":
        del state[name]
    elif damage == "extra":
        state[f"other.{name}"] = torch.zeros(3)
    else:
        state[name] = state[name][:-1].clone()
    save_file(state, file)
    refused(trained(lora), tmp_path, "policy" if lora is None else "policy.lora")


def test_a_folder_without_full_weights_is_refused(tmp_path: Path) -> None:
    refused(trained(None), tmp_path, "policy")


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


class Reads(torch.nn.Module):
    """One layer is called, one handed on; of another the weight is read, as by routers and by PyTorch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read, self.handed = (torch.nn.Linear(4, 4) for _ in range(3))
        self.attention = torch.nn.MultiheadAttention(4, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.called(values) + torch.nn.functional.linear(values, self.read.weight)
        values = torch.nn.Sequential(self.handed)(values.to(self.handed.weight.dtype))
        return self.attention(values, values, values)[0]


@torch.no_grad()
def test_a_layer_that_is_only_read_gets_no_adapter() -> None:
    choice = TrainingChoice(LoraSettings(2, 8.0, "(called|read|attention.out_proj)"))
    with pytest.raises(InputError, match="read is never called"):
        train_model(Reads(), choice, base_name="tiny")
    trained = train_model(Reads(), TrainingChoice(LoraSettings(2, 8.0)), base_name="tiny", default_targets="all-linear")
    disturb(trained.trainable_parameters())
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    expected = trained.model(values)
    with trained.merged():
        torch.testing.assert_close(trained.model(values), expected)
    assert {name.split(".")[2] for name in weights_of(trained)} == {"called", "handed"}


def test_weights_come_back_when_sampling_fails() -> None:
    trained = adapted(EVERY_LINEAR)
    expected = logprobs(trained.model)
    with pytest.raises(KeyboardInterrupt), trained.merged():
        raise KeyboardInterrupt
    assert torch.equal(logprobs(trained.model), expected)
