"""A merged export computes what the base computes with its adapter, whichever modules have one, tied weights too."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.loading import CAUSAL_LM, on_meta, train_language_model
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.policies.trained.whole import save_whole
from grpo_core.policies.vision_lm.loading import VISION_LM
from grpo_core.policies.vision_lm.policy import VisionLMPolicy
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from tests.grpo_core.policies.causal_lm.model_types import make_model
from tests.grpo_core.policies.trained.tiny_models import disturb
from tests.grpo_core.policies.vision_lm import tiny_families
from tests.tiny_policies import MODEL

# Of merged weights; a tied weight that is changed in both places is ten nats away.
ROUNDING = 1e-4
LORA = LoraSettings(rank=2, alpha=4.0)
BLOCKS = r".*\.(q_proj|c_attn|query_key_value)"
HEAD, EMBEDDING = "(lm_head)", r"(.*\.)?(embed_tokens|wte|word_embeddings)"
CHOICES: Mapping[str, LoraSettings] = {
    "head": replace(LORA, targets=HEAD),
    "embedding": replace(LORA, targets=EMBEDDING),
    "head and blocks": replace(LORA, targets=f"{HEAD}|{BLOCKS}"),
    "head and embedding": replace(LORA, targets=f"{HEAD}|{EMBEDDING}"),
    "dora": replace(LORA, targets=HEAD, use_dora=True, use_rslora=True),
    "whole head": replace(LORA, targets=BLOCKS, modules_to_save=("lm_head",)),
}


def merged(trained: TrainedModel, folder: Path, load_base: Callable[[], Any]) -> Path:
    """Save what is trained, and the base with it."""
    for name in ("adapter", "merged"):
        (folder / name).mkdir()
    disturb(trained.trainable_parameters(), 0.05)
    trained.save(folder / "adapter")
    save_whole(folder / "adapter", folder / "merged", load_base)
    return folder / "merged"


def own(kind: str) -> Any:
    """A model with a configuration of its own, which is changed with it."""
    model = make_model(kind)
    model.config = copy.deepcopy(model.config)
    return model


@torch.no_grad()
def logprobs(model: nn.Module) -> Tensor:
    found: Tensor = model(input_ids=torch.arange(12).reshape(2, 6), use_cache=False).logits.log_softmax(-1)
    return found


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "llama"])
@pytest.mark.parametrize("where", CHOICES)
def test_a_merged_language_model_is_the_base_with_its_adapter(kind: str, where: str, tmp_path: Path) -> None:
    base = logprobs(make_model(kind))
    trained = train_language_model(make_model(kind), TrainingChoice(CHOICES[where]), base_name=kind)
    folder = merged(trained, tmp_path, lambda: own(kind))
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert (logprobs(trained.model) - base).abs().max() > 0.1
    torch.testing.assert_close(logprobs(loaded), logprobs(trained.model), rtol=0, atol=ROUNDING)
    assert not loaded.config.tie_word_embeddings


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("where", ["head", "embedding"])
def test_a_tied_weight_is_not_moved_into_an_adapter(init: Any, where: str) -> None:
    """The other module that uses it would change from the start; also without weights, as the checks see it."""
    choice = TrainingChoice(replace(CHOICES[where], init_lora_weights=init))
    for build in (
        lambda: train_language_model(make_model("qwen2"), choice, base_name=""),
        lambda: train_language_model(on_meta(make_model("qwen2").config, CAUSAL_LM), choice, base_name=""),
    ):
        with pytest.raises(InputError, match=r"init_lora_weights.*(lm_head|embed_tokens)"):
            build()
    train_language_model(make_model("llama"), choice, base_name="")


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3"])
@pytest.mark.parametrize("targets", [r"(.*\.)?lm_head", r".*\.embed_tokens", r".*(patch_embed\.proj|patch_embedding)"])
@torch.no_grad()
def test_a_merged_vision_model_is_the_base_with_its_adapter(kind: str, targets: str, tmp_path: Path) -> None:
    base, processor = tiny_families.make_model(kind)
    base.config.tie_word_embeddings = base.config.get_text_config().tie_word_embeddings = True
    base.tie_weights()
    base.save_pretrained(tmp_path / "base")

    def load(folder: Path) -> Any:
        return AutoModelForImageTextToText.from_pretrained(folder).eval()

    choice = TrainingChoice(replace(LORA, targets=targets), freeze_vision=False)
    trained = train_language_model(load(tmp_path / "base"), choice, VISION_LM, base_name=kind)
    folder = merged(trained, tmp_path, lambda: load(tmp_path / "base"))
    policies = [
        VisionLMPolicy(each, processor, VisionLMSettings(max_completion_length=6))
        for each in (trained, train_language_model(load(folder), TrainingChoice(None), VISION_LM, base_name=kind))
    ]
    actions = tiny_families.drawn(policies[0], kind).actions
    found, expected = (each.logprobs(actions).logprobs for each in reversed(policies))
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)
    with trained.reference() as reference:
        assert (policies[0]._score(reference, actions, entropy="none").logprobs - expected).abs().max() > 0.01


@torch.no_grad()
def test_a_merged_denoising_model_is_the_base_with_its_adapter(tmp_path: Path) -> None:
    """Linear layers, those inside norms, and the convolution that reads patches."""
    source = MODEL.with_name("tiny-sd3") / "transformer"

    def load() -> Any:
        return SD3Transformer2DModel.from_pretrained(source).eval()

    choice = TrainingChoice(replace(LORA, targets=r".*(to_q|norm1\.linear|context_embedder|pos_embed\.proj|proj_out)"))
    trained = train_model(load(), choice, base_name="")
    folder = merged(trained, tmp_path, load)
    config, generator = load().config, torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(2, config.in_channels, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, config.joint_attention_dim, generator=generator),
        "pooled_projections": torch.randn(2, config.pooled_projection_dim, generator=generator),
        "timestep": torch.tensor([100.0, 700.0]),
    }
    expected = trained.model(**inputs).sample
    found = SD3Transformer2DModel.from_pretrained(folder).eval()(**inputs).sample
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)
    assert (load()(**inputs).sample - expected).abs().max() > 0.01
