"""The GPU memory and disk space of a causal language model; no stage of a run computes it."""

from collections.abc import Mapping

from grpo_core.policies.causal_lm.adapters import build_on_meta
from grpo_core.policies.causal_lm.loading import read_config
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.estimate import (
    MemoryEstimate,
    MemoryPart,
    ModelEstimate,
    TransformerEstimate,
    Workload,
    sampling_parts,
)
from grpo_core.policies.trained import TrainingChoice
from grpo_core.streams import Stream

PROMPT_TOKENS = 512
"""Assumed number of ids of the longest prompt of a batch."""

AFTER_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Configuration fields that announce an operation after the output head."""


def estimate(
    model: str,
    settings: CausalLMSettings,
    choices: Mapping[Stream, TrainingChoice],
    workloads: Mapping[Stream, Workload],
) -> ModelEstimate:
    """Estimate the GPU memory and disk space that the model needs; nothing is loaded.

    Raises:
        InputError: its configuration is not on this machine, or no parameter is trained.
    """
    config, choice, workload = read_config(model), choices["tokens"], workloads["tokens"]
    text = config.get_text_config()
    transformer = TransformerEstimate(build_on_meta(model, config, choice), choice, workload, text)
    # The last sampled token is never fed back.
    tokens, vocabulary = settings.max_completion_length, text.vocab_size
    length = PROMPT_TOKENS + tokens - 1
    b, count = transformer.b, transformer.parameters
    whole_logits = any(getattr(text, name, None) not in (None, 1, 1.0) for name in AFTER_HEAD)
    parts = [
        MemoryPart("weights", "always", count * b, f"{count / 1e9:.3g} B parameters x {b} bytes"),
        *transformer.training_parts(),
        *sampling_parts(text, workload, length, vocabulary, vocabulary),
        *transformer.backward_parts(length, tokens, vocabulary, whole_logits=whole_logits),
    ]
    counted = f"{count / 1e6:.4g} M parameters in {text.num_hidden_layers} layers{transformer.adapters}"
    return ModelEstimate(MemoryEstimate(tuple(part for part in parts if part.bytes)), transformer.checkpoint, counted)
