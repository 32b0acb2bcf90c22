"""What is no usable model is refused before its weights are opened, with what would do."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.family import FAMILY
from grpo_core.policies.causal_lm.loading import (
    load_model,
    matrices_without_adapter,
    train_language_model,
    vocabulary_size,
)
from grpo_core.policies.causal_lm.prompts import encode_prompt, prompt_ids
from grpo_core.policies.causal_lm.settings import CausalLMSettings, Context
from grpo_core.policies.encoded_prompts import pad_prompts
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.messages import read_messages
from tests.grpo_core.policies.causal_lm.model_types import make_model, make_tokenizer, small_model
from tests.tiny_policies import TEXT_MODEL, TEXT_PROMPTS

CPU = torch.device("cpu")
SETTINGS = CausalLMSettings()


def refused(model: Path | str, settings: CausalLMSettings = SETTINGS) -> InputError:
    with pytest.raises(InputError) as caught:
        FAMILY.refuse_unusable(str(model), settings)
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TEXT_MODEL, tmp_path / "model"))


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


def test_a_gguf_file_is_converted_first(folder: Path) -> None:
    named = refused("model.Q4_K_M.gguf").hint
    (folder / "model.gguf").touch()
    # Beside a whole model it does not matter.
    FAMILY.refuse_unusable(str(folder), SETTINGS)
    (folder / "config.json").unlink()
    assert "from_gguf" in named
    assert refused(folder).hint == named


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


PLAIN = CausalLMSettings(chat_template=False)


def stored(*messages: tuple[str, str]) -> str:
    return json.dumps([{"role": role, "content": content} for role, content in messages])


def test_rows_are_what_the_tokenizer_pads_by_itself() -> None:
    tokenizer = make_tokenizer()
    encoded = pad_prompts([encode_prompt(tokenizer, PLAIN, each, context=Context()) for each in TEXT_PROMPTS], CPU)
    padded = tokenizer(list(TEXT_PROMPTS), padding=True, return_tensors="pt")
    assert torch.equal(encoded.attention_mask, padded["attention_mask"])
    assert torch.equal(encoded.input_ids * encoded.attention_mask, padded["input_ids"] * padded["attention_mask"])
    for row, length in enumerate(encoded.lengths.tolist()):
        assert encoded.position_ids[row, -length:].tolist() == list(range(length))


BRIEF = CausalLMSettings(system_prompt="be short")
RENDERED: dict[str, tuple[CausalLMSettings, str, str]] = {
    "a user's message": (SETTINGS, "ok", "<|user|>ok<|end|><|assistant|>"),
    "the same as messages": (SETTINGS, stored(("user", "ok")), "<|user|>ok<|end|><|assistant|>"),
    "a system prompt": (BRIEF, "ok", "<|system|>be short<|end|><|user|>ok<|end|><|assistant|>"),
    "a system prompt of its own": (
        BRIEF,
        stored(("system", "be long"), ("user", "ok")),
        "<|system|>be long<|end|><|user|>ok<|end|><|assistant|>",
    ),
    "an answer that was begun": (
        SETTINGS,
        stored(("user", "ok"), ("assistant", "yes, b")),
        "<|user|>ok<|end|><|assistant|>yes, b",
    ),
}


@pytest.mark.parametrize("case", RENDERED)
def test_prompts_are_rendered_by_the_template(case: str) -> None:
    settings, prompt, rendered = RENDERED[case]
    tokenizer = make_tokenizer()
    ids = prompt_ids(tokenizer, settings, prompt)
    assert tokenizer.decode(ids) == rendered
    assert ids == tokenizer(rendered)["input_ids"]


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3] sorted?",
        "[1, 2, 3]",
        "[]",
        '[{"from": "human", "value": "a"}]',
        '{"role": "user", "content": "a"}',
        '["role", "content"]',
    ],
)
def test_other_json_is_plain_text(text: str) -> None:
    assert read_messages(text) is None
    tokenizer = make_tokenizer()
    assert text in tokenizer.decode(prompt_ids(tokenizer, CausalLMSettings(), text))


@pytest.mark.parametrize(
    ("settings", "prompt", "place"),
    [
        (CausalLMSettings(chat_template=True), "ok", "rollout.chat_template"),
        (CausalLMSettings(system_prompt="be short"), "ok", "rollout.system_prompt"),
        (CausalLMSettings(), stored(("user", "ok")), "prompt"),
        (CausalLMSettings(), "", "prompt"),
    ],
)
def test_without_a_template_what_needs_one_is_refused(settings: CausalLMSettings, prompt: str, place: str) -> None:
    with pytest.raises(InputError) as refused:
        prompt_ids(make_tokenizer(template=False), settings, prompt)
    assert refused.value.place == place


def test_a_template_that_prints_the_date_prints_the_same_one_every_day() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{%- set today = strftime_now('%d %b %Y') -%}"
        "{{ strftime_now('%Y-%m-%d') }}, {{ today }}: {{ messages[0].content }}"
    )
    assert tokenizer.decode(prompt_ids(tokenizer, CausalLMSettings(), "ok")) == "2025-01-01, 01 Jan 2025: ok"


def test_what_a_template_refuses_is_named() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="roles must alternate"):
        prompt_ids(tokenizer, CausalLMSettings(), "ok")


def test_the_longest_prompt_that_fits_passes_and_one_id_more_does_not() -> None:
    tokenizer, settings = make_tokenizer(), CausalLMSettings(chat_template=False, max_completion_length=10)
    encode_prompt(tokenizer, settings, "b" * 54, context=Context(64))
    with pytest.raises(InputError, match=r"55 .* 54 .* 10 .* 64") as refused:
        encode_prompt(tokenizer, settings, "b" * 55, context=Context(64))
    assert (refused.value.place, refused.value.value) == ("prompt", "b" * 55)


# --- adapters


def test_a_router_that_is_a_linear_layer_by_class_gets_no_adapter() -> None:
    model = small_model("phimoe")
    with pytest.raises(InputError, match="router") as caught:
        train_language_model(model, TrainingChoice(LoraSettings(targets=".*router")), base_name="")
    assert caught.value.place == "policy.lora.targets"
    train_language_model(model, TrainingChoice(LoraSettings(rank=2)), base_name="")
    assert "model.layers.*.mlp.router.weight" in matrices_without_adapter(model)
    assert not any("router.lora" in name for name, _ in model.named_parameters())


def test_matrices_without_an_adapter_are_counted() -> None:
    """DeepSeek-V3: peft takes its dense MLPs and shared experts for experts."""
    model = small_model("deepseek_v3")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    train_language_model(model, TrainingChoice(LoraSettings(rank=2)), base_name="")
    shared = "model.layers.{}.mlp.shared_experts.gate_proj.weight"
    expected = sum(sizes.get(shared.format(layer), 0) for layer in range(len(model.model.layers)))
    assert matrices_without_adapter(model)[shared.format("*")] == expected > 0
    plain = make_model("llama")
    train_language_model(plain, TrainingChoice(LoraSettings(rank=2)), base_name="")
    assert matrices_without_adapter(plain) == {}
