"""Small language models of several architectures, made in code, with logits that depend on what is read.

`python -m tests.grpo_core.policies.causal_lm.model_types` writes the table and its section of docs/models.md.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from data.recipes.text import build_tokenizer
from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.loading import matrices_without_adapter, train_language_model
from grpo_core.policies.causal_lm.model_types import REFUSED, TRIED, refuse_known
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from tests.grpo_core.policies.causal_lm.small_configs import small_values
from tests.grpo_core.policies.trained.tiny_models import disturb

# Wider than the tokenizer, as heads padded to a round number are.
HEAD_ROWS = 288
_WIDTHS = {
    "vocab_size": HEAD_ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 268,
}
_ABSOLUTE = {"vocab_size": HEAD_ROWS, "bos_token_id": None, "eos_token_id": 268, "initializer_range": 0.3}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_WIDTHS),
    "qwen2": Qwen2Config(**_WIDTHS, tie_word_embeddings=True),
    "gpt2": GPT2Config(**_ABSOLUTE, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    # A window shorter than prompt and completion, and a cap that its logits reach.
    "gemma2": Gemma2Config(**_WIDTHS, head_dim=8, sliding_window=6, final_logit_softcapping=5.0),
    "granite": GraniteConfig(**_WIDTHS, logits_scaling=4.0),
    "cohere": CohereConfig(**_WIDTHS, logit_scale=0.25),
    "bloom": BloomConfig(**_ABSOLUTE, hidden_size=32, n_layer=2, n_head=4),
}
AFTER_HEAD = {"gemma2", "granite", "cohere"}


def make_model(kind: str) -> Any:
    """A model with seeded weights, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


def make_tokenizer(*, pad: bool = True, template: bool = True) -> PreTrainedTokenizerFast:
    """The tiny text model's, with or without a pad token and a chat template."""
    tokenizer = build_tokenizer()
    if not pad:
        tokenizer.pad_token = None
    if not template:
        tokenizer.chat_template = None
    return tokenizer


def change_inputs(model: Any, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the model's body is given from now on."""

    def before(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        change(named)
        return arguments, named

    model.base_model.register_forward_pre_hook(before, with_kwargs=True)


TABLE = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[4] / "docs" / "models.md"
TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
BEGIN, END = "<!-- types: begin -->", "<!-- types: end -->"

# What the defaults of transformers lack, and layers of each kind that published hybrids have.
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [3, 7], "num_hidden_layers": 8},
    "blenderbot": {"encoder_layers": 4, "decoder_layers": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64, "num_experts": 4, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "ministral": {"head_dim": 64},
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
}
_LAYERS = 4


def configurations(model_type: str) -> list[Any]:
    """The default configuration with fewer layers, and with as many as it has, where they can be built."""
    kind = CONFIG_MAPPING[model_type]
    settings = dict(_SETTINGS.get(model_type, {}))
    found = []
    for layers in ({"num_hidden_layers": _LAYERS}, {}):
        try:
            config = kind(**layers | settings)
            if hasattr(config, "is_decoder") and not config.is_decoder:
                config = kind(is_decoder=True, **layers | settings)
        except Exception:
            continue
        found.append(config)
    return found


def small_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A model of this type with narrow layers and random weights, in evaluation mode."""
    for config in configurations(model_type):
        values = small_values({**config.to_dict(), **changes})
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            try:
                return AutoModelForCausalLM.from_config(type(config).from_dict(values)).float().eval()
            except (AttributeError, ValueError):
                # Of fewer layers than its configuration names.
                continue
    raise AssertionError(f"no small {model_type}")


def small_policy(model: Any, choice: TrainingChoice, **settings: Any) -> CausalLMPolicy:
    """A policy over a small model, with the tiny tokenizer."""
    trained = train_language_model(model, choice, base_name="")
    if choice.lora is not None:
        disturb(trained.trainable_parameters(), 0.05)
    return CausalLMPolicy(trained, make_tokenizer(), CausalLMSettings(**settings))


def section() -> str:
    """The lists of docs/models.md."""
    refused = [name for name in TYPES if _is_refused(name)]
    others = [each for each in TYPES if each not in TRIED and each not in refused]
    return f"""{BEGIN}
Tried with random weights ({len(TRIED)} types of transformers {transformers.__version__}):

{", ".join(sorted(TRIED))}

Refused ({len(refused)}): {", ".join(sorted(refused))}

Not tried ({len(others)}): {", ".join(sorted(others))}
{END}"""


def _is_refused(model_type: str) -> bool:
    if model_type in REFUSED:
        return True
    try:
        for config in configurations(model_type)[:1]:
            refuse_known("", config)
    except InputError:
        return True
    return False


def left_out(model_type: str) -> list[str]:
    """The matrices that adapters on all linear layers leave out."""
    model = small_model(model_type)
    train_language_model(model, TrainingChoice(LoraSettings(rank=2, alpha=4.0)), base_name="")
    return sorted(matrices_without_adapter(model))


def main() -> None:
    """Write the table and its section of the page."""
    transformers.logging.set_verbosity_error()
    table = {each: found for each in sorted(TRIED) if (found := left_out(each))}
    lines = ",\n".join(f"{json.dumps(each)}: {json.dumps(found)}" for each, found in table.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n")
    text = PAGE.read_text()
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    PAGE.write_text(text[:begin] + section() + text[end:])


if __name__ == "__main__":
    main()
