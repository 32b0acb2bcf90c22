"""Policies over the shipped tiny GLM-Image, each with a token model of its own."""

import copy
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from diffusers import GlmImagePipeline
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import data
from grpo_core.policies.causal_lm.loading import load_model, load_tokenizer, train_language_model
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.glm_image.decoding import GlmImageDecoder
from grpo_core.policies.glm_image.loading import LANGUAGE_MODEL_LINEARS, train_half
from grpo_core.policies.glm_image.policy import GlmImagePolicy, GlmImageTokens
from grpo_core.policies.glm_image.settings import AUTOREGRESSIVE, PARTS, GlmImageSettings
from grpo_core.policies.pipeline_loading import initial_state_of
from grpo_core.policies.trained.lora_and_full import FrozenModel
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import TokenBatch
from grpo_core.rollouts.records import GroupRequest, Output
from grpo_core.settings import Truncation
from tests.grpo_core.policies.trained.tiny_models import disturb, values_of

MODEL = Path(data.__file__).parent / "models" / "tiny-glm-image"
EDIT_MODEL = MODEL.with_name("tiny-glm-image-edit")
LORA = LoraSettings(rank=4, alpha=8.0, targets=LANGUAGE_MODEL_LINEARS)
# Of different lengths, so that a batch of them is padded on the left.
PROMPTS = (
    "a red circle",
    "a green square at the bottom right on a white background",
    'a sign that says "OPEN"',
    "一只猫 🙂",
)


def build_policy(
    pipeline: GlmImagePipeline,
    *,
    height: int = 32,
    width: int = 32,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    autocast: torch.dtype | None = None,
    decode_batch_size: int = 16,
    lora: LoraSettings | None = LORA,
    keep_reference: bool = False,
    gradient_checkpointing: bool = False,
    disturbed: float = 0.0,
) -> GlmImagePolicy:
    """A policy that shares the pipeline's decoder and owns its token model.

    `disturbed` is the standard deviation of noise added to everything that is trained, so that adapters are not at
    the zero they start from.
    """
    base = copy.deepcopy(pipeline.vision_language_encoder)
    parts = GlmImagePipeline(**{**pipeline.components, "vision_language_encoder": base})
    parts.set_progress_bar_config(disable=True)
    choice = TrainingChoice(
        lora=lora, reference="device" if keep_reference else "none", gradient_checkpointing=gradient_checkpointing
    )
    initial_state = initial_state_of(str(MODEL), PARTS, AUTOREGRESSIVE, torch.float32)
    trained = train_half("tokens", base, choice, str(MODEL), initial_state=initial_state)
    prefetching = GlmImageSettings(
        height=height,
        width=width,
        temperature=temperature,
        **({} if truncation is None else asdict(truncation)),
        num_inference_steps=2,
        guidance_scale=1.0,
        decode_batch_size=decode_batch_size,
    )
    decoder = GlmImageDecoder(parts, prefetching, FrozenModel(parts.transformer))
    policy = GlmImagePolicy(GlmImageTokens(parts, prefetching, trained, autocast=autocast), decoder, ["tokens"])
    disturb(policy.tokens.trainable_parameters(), disturbed)
    return policy


def weights_of(policy: GlmImagePolicy) -> dict[str, Tensor]:
    """A copy of everything that is trained."""
    return values_of(policy.tokens.trainable_parameters())


def render(policy: GlmImagePolicy, tokens: TokenBatch, noise_seeds: Sequence[int]) -> list[Output]:
    """The images of given tokens; siblings of one prompt and size are decoded together."""
    images: dict[int, Output] = {}
    pairs = list(zip(tokens.prompts, policy.tokens.sizes_of(tokens), strict=True))
    for prompt, size in dict.fromkeys(pairs):
        rows = [row for row, pair in enumerate(pairs) if pair == (prompt, size)]
        names, noise = tuple(map(str, rows)), tuple(noise_seeds[row] for row in rows)
        (painted,) = policy.decoder.sample(
            [GroupRequest(prompt, names, tuple(rows), noise)],
            tokens.select(rows),
            size=size,
            rows_per_call=policy.settings.decode_batch_size,
        )
        images |= dict(zip(rows, painted.images, strict=True))
    return [images[row] for row in range(len(tokens))]


TEXT_MODEL = Path(data.__file__).parent / "models" / "tiny-text"
VISION_MODEL = Path(data.__file__).parent / "models" / "tiny-vision"
TEXT_LORA = LoraSettings(rank=4, alpha=8.0)
# Of different lengths, so that a batch of them is padded on the left.
TEXT_PROMPTS = ("sort the letters of banana", "ok", "sort the letters of it, please", "一只猫 🙂")


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
        model = load_model(str(TEXT_MODEL), dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = tokenizer or load_tokenizer(str(TEXT_MODEL))
    trained = train_language_model(model, choice or TrainingChoice(lora=TEXT_LORA), base_name=str(TEXT_MODEL))
    policy = CausalLMPolicy(
        trained, tokenizer, settings or CausalLMSettings(max_completion_length=12), autocast=autocast
    )
    disturb(policy.trainable_parameters(), disturbed)
    return policy
