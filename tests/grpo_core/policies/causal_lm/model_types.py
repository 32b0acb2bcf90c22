"""Small language models of several architectures, made in code, with logits that depend on what is read.

`python -m tests.grpo_core.policies.causal_lm.model_types` writes the table and docs/models.md from it.
"""

import json
import re
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
from grpo_core.policies.causal_lm.compatibility import small_copy, try_copy, why_incompatible
from grpo_core.policies.causal_lm.loading import matrices_without_adapter, train_language_model
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
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
UNTRIED = "untried"

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


def outcome(model_type: str) -> dict[str, Any]:
    """Whether the type runs, or why not; and what becomes of adapters on all linear layers."""
    for config in configurations(model_type):
        tried, reason = try_copy(config)
        if reason is not None:
            return {"refused": re.sub(r" by [-+.e\d]+ ", " ", reason)}
        if tried:
            return {"runs": True, **_adapters(config)}
    return {UNTRIED: True}


def _adapters(config: Any) -> dict[str, Any]:
    for seed in range(3):
        copy = small_copy(config, seed)
        trained = train_language_model(copy, TrainingChoice(LoraSettings(rank=2, alpha=4.0)), base_name="")
        disturb(trained.trainable_parameters(), 0.05)
        reason = why_incompatible(copy)
        if reason is None:
            break
    left_out = sorted(matrices_without_adapter(copy))
    return {"adapters": reason or "fit"} | ({"left_out": left_out} if left_out else {})


def page(table: Mapping[str, Mapping[str, Any]]) -> str:
    """docs/models.md."""
    runs = [each for each, found in table.items() if "runs" in found]
    untried = [each for each, found in table.items() if UNTRIED in found]
    refused: dict[str, list[str]] = {}
    for each, found in table.items():
        if "refused" in found:
            refused.setdefault(found["refused"], []).append(each)
    left_out: dict[str, list[str]] = {}
    for each in runs:
        if "left_out" in table[each]:
            left_out.setdefault(", ".join(f"`{name}`" for name in table[each]["left_out"]), []).append(each)
    return f"""# Language models that run

A model is tried before any weights are read: a copy of it with random weights and narrow layers samples and scores
a few tokens, and its log-probs are compared with those of a plain forward pass over each row. It needs a cache that
the samples of a prompt can share, positions that can be given for padded prompts, and logits of every position.
`grpo doctor` and the start of a run refuse a model that lacks one of these.

With LongRoPE (Phi-3, Phi-4, PhiMoE) prompt and completion have to fit into the original length, such as 4,096 ids of
131,072: past it the model has other frequencies, and what was sampled below it cannot be scored in one pass. Longer
ones are refused before anything is sampled. vLLM takes the long factors for all rows where its context is larger, so
a server is started with `--max-model-len` of that length.

The lists are those of transformers {transformers.__version__}, each type with its default configuration and fewer
layers. A model of the same type with other layers can differ: the check asks the model's own configuration, not
this list.

## Runs ({len(runs)})

{", ".join(runs)}

## Refused ({sum(map(len, refused.values()))})

| because | types |
|---|---|
{_rows(refused)}

Most decoders of encoder-decoder models take no explicit positions, and those of RoBERTa's kind count theirs from
another number: they would be trained on log-probs of another text.

## Tried when loaded ({len(untried)})

No small copy of their default configuration can be built. A run tries such a model with its own weights before it
samples anything.

{", ".join(untried)}

## What adapters leave out

`policy.lora` without `targets` means peft's `all-linear`. In these types some matrices get no adapter; `grpo
doctor` and the start of a run say how many parameters they have. Experts that are one parameter instead of linear
layers, routers, and layers that peft takes for experts because they share a name with them are the usual cases.
`policy.lora.targets` cannot add them: they are trained by full training (`policy.lora: null`) alone.

| without an adapter | types |
|---|---|
{_rows(left_out)}
"""


def _rows(types_by_cell: Mapping[str, list[str]]) -> str:
    return "\n".join(f"| {cell} | {', '.join(types)} |" for cell, types in types_by_cell.items())


def main() -> None:
    """Write the table and the page."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    table = {}
    for each in sorted(TYPES):
        table[each] = outcome(each)
        print(each, table[each], flush=True)
    lines = ",\n".join(f"{json.dumps(each)}: {json.dumps(found)}" for each, found in table.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n")
    PAGE.write_text(page(table))


if __name__ == "__main__":
    main()
