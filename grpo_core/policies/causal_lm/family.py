"""Causal language models as a kind of policy; their libraries are imported when a model is looked at."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.estimate import ModelEstimate, Workload
from grpo_core.policies.family import PolicyFamily
from grpo_core.policies.trained import TrainingChoice
from grpo_core.records import Modality

if TYPE_CHECKING:
    from grpo_core.policies.causal_lm.policy import CausalLMPolicy


class CausalLMFamily:
    """See PolicyFamily."""

    modality: Modality = "text"

    def settings(self, values: Mapping[str, Any]) -> CausalLMSettings:
        """See PolicyFamily.settings."""
        known = {field.name: values[field.name] for field in fields(CausalLMSettings) if field.name in values}
        stop = known.get("stop", ())
        # A table keeps it as a JSON list.
        known["stop"] = tuple(json.loads(stop) if isinstance(stop, str) else stop)
        return CausalLMSettings(**known)

    def load(
        self,
        model: str,
        settings: CausalLMSettings,
        choice: TrainingChoice,
        *,
        dtype: torch.dtype,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> "CausalLMPolicy":
        """See PolicyFamily.load."""
        from grpo_core.policies.causal_lm.policy import CausalLMPolicy

        return CausalLMPolicy.load(model, settings, choice, dtype=dtype, device=device, autocast=autocast)

    def refuse_missing(self, model: str) -> None:
        """See PolicyFamily.refuse_missing."""
        from grpo_core.policies.causal_lm.loading import at_hand, read_config, refuse_missing_folder

        refuse_missing_folder(model)
        if at_hand(model):
            read_config(model)

    def refuse_unusable(self, model: str, settings: CausalLMSettings) -> None:
        """See PolicyFamily.refuse_unusable."""
        from grpo_core.policies.causal_lm.loading import at_hand, context_length, load_tokenizer, read_config
        from grpo_core.policies.causal_lm.prompts import uses_template

        self.refuse_missing(model)
        if not at_hand(model):
            return
        context = context_length(read_config(model))
        uses_template(load_tokenizer(model), settings)
        if context is not None and settings.max_completion_length >= context:
            hint = f"The model reads {context} ids, prompt and completion together; set it lower."
            raise InputError("rollout.max_completion_length", settings.max_completion_length, hint)

    def refuse_prompts(self, model: str, settings: CausalLMSettings, prompts: Sequence[str]) -> None:
        """See PolicyFamily.refuse_prompts."""
        from grpo_core.policies.causal_lm.loading import context_length, load_tokenizer, read_config
        from grpo_core.policies.causal_lm.prompts import prompt_ids, require_room

        context, tokenizer = context_length(read_config(model)), load_tokenizer(model)
        for prompt in dict.fromkeys(prompts):
            require_room(prompt, len(prompt_ids(tokenizer, settings, prompt)), settings, context)

    def refuse_choice(self, model: str, choice: TrainingChoice) -> None:
        """See PolicyFamily.refuse_choice."""
        from transformers import AutoModelForCausalLM

        from grpo_core.policies.causal_lm.loading import read_config
        from grpo_core.policies.causal_lm.training import train_causal_lm

        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(read_config(model))
        train_causal_lm(base, choice, base_name=model, initial_state=dict)

    def estimate(
        self, model: str, settings: CausalLMSettings, choice: TrainingChoice, workload: Workload
    ) -> ModelEstimate:
        """See PolicyFamily.estimate."""
        from grpo_core.policies.causal_lm.loading import read_config
        from grpo_core.policies.causal_lm.memory import checkpoint_bytes, estimate_memory, model_sizes

        lora = choice.lora
        sizes = model_sizes(
            read_config(model), lora_rank=lora.rank if lora else None, lora_targets=lora.targets if lora else None
        )
        memory = estimate_memory(
            sizes,
            dtype=workload.dtype,
            max_completion_length=settings.max_completion_length,
            group_size=workload.group_size,
            prompts_per_batch=workload.prompts_per_batch,
            micro_batch_size=workload.micro_batch_size,
            reference_on_device=choice.reference == "device",
            gradient_checkpointing=choice.gradient_checkpointing,
            eight_bit_optimizer=workload.eight_bit_optimizer,
        )
        adapters = f", adapters {sizes.adapter / 1e6:.3g} M" if sizes.adapter else ""
        counted = f"{sizes.parameters / 1e6:.4g} M parameters in {sizes.layers} layers{adapters}"
        return ModelEstimate(memory, checkpoint_bytes(sizes, workload.dtype), counted)


FAMILY: PolicyFamily = CausalLMFamily()
