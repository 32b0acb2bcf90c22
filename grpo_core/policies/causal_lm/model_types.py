"""Types of language models by what is known of them: those that this project's tests try, and those that cannot run."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from grpo_core.errors import InputError

_TRIED = """
afmoe apertus arcee aria_text axk1 axk2 beam bert bert-generation big_bird biogpt bitnet bloom cohere cohere2
cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 dots3_note_text electra emu3
ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text
gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa
got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe
granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4 llama4_text longcat_flash mellum mimo_v2_flash
minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama modernbert-decoder
moss_transcribe_diarize mpt nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal
phimoe qwen2 qwen2_moe qwen3 qwen3_moe roformer seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
whisper xglm youtu
"""
TRIED = frozenset(_TRIED.split())
"""Types of AutoModelForCausalLM that pass the trial with random weights and few narrow layers."""

_WITH_IMAGES = """
gemma3 glm4v idefics3 internvl llava llava_onevision mistral3 paligemma qwen2_5_vl qwen2_vl qwen3_vl smolvlm
"""
TRIED_WITH_IMAGES = frozenset(_WITH_IMAGES.split())
"""The same of AutoModelForImageTextToText, whose images have to count."""

_REASONS: Mapping[str, str] = {
    "it gives no cache of keys and values": "megatron-bert openai-gpt rembert roc_bert rwkv xlm xlnet xlstm",
    "it takes no explicit positions, so a padded prompt would be read as another": """
bart bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text git marian mbart moshi mvp pegasus
plbart roberta roberta-prelayernorm trocr xlm-roberta xlm-roberta-xl xmod
""",
    "it cannot continue several samples from one cache": "cpmant deepseek_v4 prophetnet",
}

REFUSED: Mapping[str, str] = MappingProxyType(
    {name: reason for reason, names in _REASONS.items() for name in names.split()}
)
"""Why a type of AutoModelForCausalLM cannot be trained, whatever its layers."""


def refuse_known(model: str, config: Any) -> None:
    """Raise InputError for a model that cannot run by its type or by the caches of its layers; no weights are read."""
    reason = None
    if config.model_type not in TRIED | TRIED_WITH_IMAGES:
        reason = REFUSED.get(config.model_type) or _unusable_cache(config)
    if reason is not None:
        hint = f"A {config.model_type} model cannot be trained here: {reason}. docs/models.md lists those that can."
        raise InputError("policy.model", model, hint)


def refuse_static_cache(config: Any, classes: str | Sequence[str]) -> None:
    """Raise InputError for a model whose passes cannot have fixed shapes, by its configuration and its classes' names.

    transformers says so of a class, by that of its first name.
    """
    name = classes if isinstance(classes, str) else classes[0]
    others = {type(layer).__name__ for layer in DynamicCache(config=config).layers if type(layer) is not DynamicLayer}
    if not getattr(transformers, name)._can_compile_fullgraph:
        others = {"no static cache in transformers"}
    if others:
        hint = f"A {config.model_type} model has {', '.join(sorted(others))}; use dynamic."
        raise InputError("rollout.cache_implementation", "static", hint)


def _unusable_cache(config: Any) -> str | None:
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        # Of a type with a cache of its own kind nothing is known before it is loaded.
        return None
    lacking = {
        type(layer).__name__
        for layer in layers
        if isinstance(layer, LinearAttentionCacheLayerMixin) or not hasattr(layer, "batch_select_indices")
    }
    if not lacking:
        return None
    return f"layers keep a state that the samples of a prompt cannot share ({', '.join(sorted(lacking))})"
