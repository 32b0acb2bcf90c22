"""What is no usable model is refused before its weights are opened, with what would do."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, LlamaConfig, LlamaModel, T5Config

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.family import FAMILY
from grpo_core.policies.causal_lm.loading import load_model, vocabulary_size
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from tests.grpo_core.policies.causal_lm.made_models import make_model, make_tokenizer
from tests.tiny_text_policy import MODEL

CPU = torch.device("cpu")
SETTINGS = CausalLMSettings()


def refused(model: Path | str, settings: CausalLMSettings = SETTINGS) -> InputError:
    with pytest.raises(InputError) as caught:
        FAMILY.refuse_unusable(str(model), settings)
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "data/models/nowhere", "a/b/c"])
def test_a_folder_that_is_not_there(model: str) -> None:
    assert "no such folder" in refused(model).hint


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    assert "config.json" in refused(tmp_path).hint


def test_a_hub_name_passes_until_it_is_loaded() -> None:
    FAMILY.refuse_unusable("nobody/nothing", SETTINGS)
    with pytest.raises(InputError, match="cached or reachable"):
        load_model("nobody/nothing", dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("config", [BertConfig(architectures=["BertModel"]), T5Config()])
def test_another_kind_of_model(folder: Path, config: BertConfig | T5Config) -> None:
    config.save_pretrained(folder)
    assert "causal language model" in refused(folder).hint


def test_a_model_without_its_head(tmp_path: Path) -> None:
    widths = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaModel(LlamaConfig(vocab_size=269, **widths))
    model.save_pretrained(tmp_path)
    assert "LlamaModel" in refused(tmp_path).hint
    # A configuration that names no class is believed until the weights are opened.
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": None}))
    with pytest.raises(InputError, match="lm_head"):
        load_model(str(tmp_path), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"model_type": "unheard of"}', '{"model_type": "llama", "vocab_size": "a"}']
)
def test_a_damaged_configuration(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert refused(folder).place == "policy.model"


def test_no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer cannot be read" in refused(folder).hint


@pytest.mark.parametrize("content", [None, b"", b"no tensors"])
def test_weights_that_are_missing_or_damaged(folder: Path, content: bytes | None) -> None:
    (folder / "model.safetensors").unlink()
    if content is not None:
        (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="weights"):
        load_model(str(folder), dtype=torch.float32, device=CPU)


def test_settings_that_the_model_cannot_follow(folder: Path) -> None:
    assert refused(folder, CausalLMSettings(max_completion_length=512)).place == "rollout.max_completion_length"
    (folder / "chat_template.jinja").unlink()
    FAMILY.refuse_unusable(str(folder), SETTINGS)
    assert refused(folder, CausalLMSettings(chat_template=True)).place == "rollout.chat_template"
    assert refused(folder, CausalLMSettings(system_prompt="be short")).place == "rollout.system_prompt"


def test_a_tokenizer_of_another_model() -> None:
    model, tokenizer = make_model("llama"), make_tokenizer()
    assert vocabulary_size(model, tokenizer) == 269
    tokenizer.add_tokens([f"word{index}" for index in range(40)])
    with pytest.raises(InputError, match="308, its embedding 288"):
        vocabulary_size(model, tokenizer)
