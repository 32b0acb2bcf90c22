"""What an update changed goes to disk and back to the bit, and peft and transformers read it as it is."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import GlmImagePipeline
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GlmImageForConditionalGeneration

from grpo_core.errors import InputError
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.trained import ADAPTER_FILE, WEIGHTS_FILE, LoraSettings, TrainingChoice, train_model
from tests.grpo_core.policies.trained.tiny_models import same, tiny_llama
from tests.tiny_policy import LORA, MODEL, build_policy, weights_of

CHOICES = [pytest.param(LORA, id="adapters"), pytest.param(None, id="full weights")]


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    """On fixed ids and positions."""
    ids = torch.arange(2 * 20).reshape(2, 20)
    positions = torch.arange(20).expand(3, 2, 20)
    found: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return found


@pytest.mark.parametrize("lora", CHOICES)
def test_saved_weights_come_back_to_the_bit(
    shipped_pipeline: GlmImagePipeline, lora: LoraSettings | None, tmp_path: Path
) -> None:
    first = build_policy(shipped_pipeline, lora=lora, disturbed=0.05)
    first.tokens.save_weights(tmp_path)
    second = build_policy(shipped_pipeline, lora=lora)
    start = weights_of(second)
    assert not same(weights_of(first), start)
    second.tokens.load_weights(tmp_path)
    assert same(weights_of(first), weights_of(second))
    assert torch.equal(logits_of(first.tokens.trained.model), logits_of(second.tokens.trained.model))
    second.tokens.load_weights(None)
    assert same(weights_of(second), start)


@pytest.mark.parametrize("lora", CHOICES)
def test_the_same_weights_are_the_same_bytes(
    shipped_pipeline: GlmImagePipeline, lora: LoraSettings | None, tmp_path: Path
) -> None:
    """A policy's digest is of its files."""
    name = WEIGHTS_FILE if lora is None else ADAPTER_FILE
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        build_policy(shipped_pipeline, lora=lora, disturbed=0.05).tokens.save_weights(folder)
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
def test_peft_loads_the_adapter_as_it_is(
    shipped_pipeline: GlmImagePipeline, lora: LoraSettings, tmp_path: Path
) -> None:
    policy = build_policy(shipped_pipeline, lora=lora, disturbed=0.05)
    policy.tokens.save_weights(tmp_path)
    base = copy.deepcopy(shipped_pipeline.vision_language_encoder)
    plain = logits_of(base)
    loaded = PeftModel.from_pretrained(base, str(tmp_path))
    assert torch.equal(logits_of(loaded), logits_of(policy.tokens.trained.model))
    assert not torch.allclose(logits_of(loaded), plain, atol=0.1)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8.0, str(MODEL))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", ADAPTER_FILE]


def test_an_adapter_names_the_revision_of_its_model_and_not_the_copy_here(tmp_path: Path) -> None:
    choice = TrainingChoice(LoraSettings(2, 4.0, "all-linear"), hub=("organisation/model", "v1"))
    train_model(tiny_llama(), choice, base_name="a/local/copy").save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("organisation/model", "v1")


def test_transformers_loads_the_full_weights_as_they_are(shipped_pipeline: GlmImagePipeline, tmp_path: Path) -> None:
    policy = build_policy(shipped_pipeline, lora=None, disturbed=0.05)
    policy.tokens.save_weights(tmp_path)
    loaded = GlmImageForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits_of(loaded), logits_of(policy.tokens.trained.model))
    assert not torch.allclose(logits_of(loaded), logits_of(shipped_pipeline.vision_language_encoder), atol=0.1)


# --- weights that are for something else


def refused(policy: GlmImagePolicy, folder: Path, message: str) -> None:
    """The load is refused, and nothing of it was taken."""
    before = weights_of(policy)
    with pytest.raises(InputError, match=message):
        policy.tokens.load_weights(folder)
    assert same(weights_of(policy), before)


@pytest.mark.parametrize(
    "other",
    [replace(LORA, rank=8), replace(LORA, targets=r".*language_model.*q_proj"), replace(LORA, rank=2)],
    ids=["larger rank", "fewer targets", "smaller rank"],
)
def test_an_adapter_of_another_shape_is_refused_whole(
    shipped_pipeline: GlmImagePipeline, other: LoraSettings, tmp_path: Path
) -> None:
    build_policy(shipped_pipeline, lora=LORA, disturbed=0.05).tokens.save_weights(tmp_path)
    refused(build_policy(shipped_pipeline, lora=other), tmp_path, "another model, rank or targets")


@pytest.mark.parametrize("damage", ["missing", "extra"])
def test_an_adapter_with_other_names_is_refused_whole(
    shipped_pipeline: GlmImagePipeline, damage: str, tmp_path: Path
) -> None:
    build_policy(shipped_pipeline, disturbed=0.05).tokens.save_weights(tmp_path)
    state = load_file(tmp_path / ADAPTER_FILE)
    if damage == "missing":
        state.pop(sorted(state)[-1])
    else:
        state["base_model.model.other.lora_A.weight"] = torch.zeros(4, 4)
    save_file(state, tmp_path / ADAPTER_FILE)
    refused(build_policy(shipped_pipeline), tmp_path, "another model, rank or targets")


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "no file"])
def test_full_weights_of_another_model_are_refused_whole(
    shipped_pipeline: GlmImagePipeline, damage: str, tmp_path: Path
) -> None:
    build_policy(shipped_pipeline, lora=None, disturbed=0.05).tokens.save_weights(tmp_path)
    state = load_file(tmp_path / WEIGHTS_FILE)
    if damage == "missing":
        del state["lm_head.weight"]
    elif damage == "extra":
        state["lm_head.bias"] = torch.zeros(3)
    else:
        state["lm_head.weight"] = state["lm_head.weight"][:-1].clone()
    save_file(state, tmp_path / WEIGHTS_FILE)
    if damage == "no file":
        (tmp_path / WEIGHTS_FILE).unlink()
    refused(build_policy(shipped_pipeline, lora=None), tmp_path, "for another model")
