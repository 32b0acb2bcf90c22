"""The GPU memory and disk space of a causal language model; no stage of a run computes it."""

from collections.abc import Mapping

from grpo_core.policies.causal_lm.adapters import build_on_meta
from grpo_core.policies.causal_lm.loading import read_config
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.estimate import (
    ModelEstimate,
    TrainingEstimate,
    Workload,
    backward_parts,
    combine_parts,
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
    """Estimate as `estimate_resources`, whose errors it raises."""
    config, choice, workload = read_config(model), choices["tokens"], workloads["tokens"]
    text = config.get_text_config()
    training = TrainingEstimate(build_on_meta(model, config, choice), choice, workload)
    # The last sampled token is never fed back.
    tokens, vocabulary = settings.max_completion_length, text.vocab_size
    length = PROMPT_TOKENS + tokens - 1
    whole_logits = any(getattr(text, name, None) not in (None, 1, 1.0) for name in AFTER_HEAD)
    backward = backward_parts(training, text, length, tokens, vocabulary, whole_logits=whole_logits)
    sampling = sampling_parts(text, workload, length, vocabulary, vocabulary)
    memory = combine_parts({"weights": training.parameters}, training.b, {"tokens": (training, backward)}, sampling)
    counted = f"{training.parameters / 1e6:.4g} M parameters in {text.num_hidden_layers} layers{training.adapters}"
    return ModelEstimate(memory, training.checkpoint, counted)
