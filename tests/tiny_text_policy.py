"""Policies over the shipped tiny text model, or over another model and tokenizer, each with weights of its own."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import data
from grpo_core.policies.causal_lm.adapters import train_causal_lm
from grpo_core.policies.causal_lm.loading import load_model, load_tokenizer
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained import LoraSettings, TrainingChoice
from tests.grpo_core.policies.trained.tiny_models import disturb

MODEL = Path(data.__file__).parent / "models" / "tiny-text"
LORA = LoraSettings(rank=4, alpha=8.0)
# Of different lengths, so that a batch of them is padded on the left.
PROMPTS = ("sort the letters of banana", "ok", "sort the letters of it, please", "一只猫 🙂")


def build_text_policy(
    settings: CausalLMSettings | None = None,
    *,
    model: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    choice: TrainingChoice | None = None,
    autocast: torch.dtype | None = None,
    disturbed: float = 0.0,
) -> CausalLMPolicy:
    """A policy over `model`, which it changes; without one over a fresh copy of the shipped model.

    `disturbed` is the standard deviation of noise added to everything that is trained, so that adapters are not at
    the zero they start from.
    """
    if model is None:
        model = load_model(str(MODEL), dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = tokenizer or load_tokenizer(str(MODEL))
    trained = train_causal_lm(model, choice or TrainingChoice(lora=LORA), base_name=str(MODEL))
    policy = CausalLMPolicy(
        trained, tokenizer, settings or CausalLMSettings(max_completion_length=12), autocast=autocast
    )
    disturb(policy.trainable_parameters(), disturbed)
    return policy
