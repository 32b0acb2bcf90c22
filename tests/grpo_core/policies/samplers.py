"""Samplers of tokens of every kind: text models, models of texts about images, and GLM-Image's codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import GlmImagePipeline
from torch import Tensor

from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.policies.vision_lm.prompts import process_prompt
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.rollouts.actions import Sources
from grpo_core.rollouts.records import SampledTokens
from grpo_core.settings import Truncation
from tests.grpo_core.policies.causal_lm.model_types import CONFIGS, HEAD_ROWS, make_model, make_tokenizer
from tests.grpo_core.policies.vision_lm.tiny_families import KINDS, make_policy, requested
from tests.tiny_policies import LORA, PROMPTS, TEXT_PROMPTS, build_policy, build_text_policy

# Others compute in fp64: in fp32 some CPUs' kernels differ by more than PARITY between the two passes.
PADDED_ROWS_NEED_FP32 = {"gemma2", "bloom"}
GRIDS: dict[str, dict[str, Any]] = {
    "square codes": {"height": 32, "width": 32, "disturbed": 0.0},
    "wide codes": {"height": 32, "width": 64, "disturbed": 0.05},
    "tall codes": {"height": 64, "width": 40, "disturbed": 0.05},
    "codes of full weights": {"height": 64, "width": 40, "lora": None, "disturbed": 0.02},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "whole distribution": {},
    "warm": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all cuts": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "stop texts": {"stop": ("a", "e", "z", "of")},
    "greedy": {"temperature": 1e-6},
}


@dataclass(frozen=True)
class Sampler:
    """A component that samples tokens, with prompts for it.

    Attributes:
        model: of transformers.
        head_ids: number of ids that the model has logits for.
    """

    component: Any
    model: Any
    prompts: tuple[str, ...]
    sources: Sources | None = None
    head_ids: int = 0

    def draw(self, places: Sequence[int], group_size: int, seeds: Sequence[int]) -> SampledTokens:
        sources = None if self.sources is None else tuple(self.sources[place] for place in places)
        sample = getattr(self.component, "sample_tokens", self.component.sample)
        sampled: SampledTokens = sample([self.prompts[place] for place in places], group_size, seeds, sources=sources)
        return sampled

    def draw_all(self) -> SampledTokens:
        """Siblings of all prompts."""
        return self.draw(range(len(self.prompts)), 3, range(len(self.prompts) * 3))

    @torch.no_grad()
    def difference(self, sampled: SampledTokens) -> float:
        scored: Tensor = self.component.logprobs(sampled.actions).logprobs
        assert not scored[~sampled.actions.loss_mask].any()
        return float((scored - sampled.rollout_logprobs).abs().max())


def make_text_policy(kind: str, settings: CausalLMSettings, choice: TrainingChoice | None = None) -> CausalLMPolicy:
    """A policy over a text model of this kind, with adapters that are not at the zero they start from."""
    model = make_model(kind) if kind in PADDED_ROWS_NEED_FP32 else make_model(kind).double()
    tokenizer = make_tokenizer(pad=kind != "llama", template=kind != "gpt2")
    return build_text_policy(settings, model=model, tokenizer=tokenizer, choice=choice, disturbed=0.05)


def make_sampler(pipeline: GlmImagePipeline, kind: str, **sampling: Any) -> Sampler:
    """Make a sampler whose trained weights are not where they start from.

    Args:
        pipeline: the shipped one.
        kind: of CONFIGS, KINDS or GRIDS.
        sampling: settings, as those of SAMPLERS.
    """
    if kind in CONFIGS:
        text = make_text_policy(kind, CausalLMSettings(max_completion_length=10, **sampling))
        return Sampler(text, text._model, TEXT_PROMPTS, head_ids=HEAD_ROWS)
    if kind in KINDS:
        policy = make_policy(kind, VisionLMSettings(max_completion_length=6, **sampling))
        return Sampler(policy, policy._model, *requested(kind))
    temperature, truncation = sampling.pop("temperature", 1.0), Truncation(**sampling)
    options = {"lora": LORA, "temperature": temperature, "truncation": truncation, **GRIDS[kind]}
    tokens = build_policy(pipeline, **options).tokens
    tokens.trained.model.double()
    return Sampler(tokens, tokens._base, PROMPTS, head_ids=88)


def own_inputs(sampler: Sampler, place: int) -> dict[str, Any]:
    """The arguments of a prompt for the model's own methods."""
    component, prompt = sampler.component, sampler.prompts[place]
    if component.parts:
        size = {"target_h": component.settings.height, "target_w": component.settings.width, "return_tensors": "pt"}
        message = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}]]
        processor = component.pipeline.processor
        return dict(processor.apply_chat_template(message, tokenize=True, return_dict=True, processor_kwargs=size))
    if sampler.sources is None:
        encoded = component.encode([prompt])
        return {"input_ids": encoded.input_ids, "attention_mask": encoded.attention_mask}
    images = [each.open() for each in sampler.sources[place]]
    read = process_prompt(component.processor, component.settings, prompt, images, component.placeholders)
    return {
        "input_ids": torch.tensor([read.ids]),
        "attention_mask": torch.ones(1, len(read.ids), dtype=torch.long),
        **{name: each.unsqueeze(0) for name, each in read.token_types.items()},
        **component.processor.image_processor([images], return_tensors="pt"),
    }


def whole_pass(sampler: Sampler, inputs: dict[str, Any], ids: Tensor) -> Tensor:
    """The logits of one pass over an unpadded row."""
    whole = torch.cat([inputs["input_ids"], ids.unsqueeze(0)], 1)
    logits: Tensor = sampler.model(whole).logits[0, -len(ids) - 1 : -1]
    return logits


def decoded(sampler: Sampler, inputs: dict[str, Any], ids: Tensor) -> Tensor:
    """The logits token by token, with the positions that the model keeps for itself after its prefill."""
    attention, found = inputs.pop("attention_mask"), []
    output = sampler.model(**inputs, attention_mask=attention, use_cache=True)
    for token in ids:
        found.append(output.logits[0, -1])
        attention, cache = torch.cat([attention, attention.new_ones(1, 1)], 1), output.past_key_values
        given = {"attention_mask": attention, "past_key_values": cache, "use_cache": True}
        output = sampler.model(input_ids=token.reshape(1, 1), **given)
    return torch.stack(found)
