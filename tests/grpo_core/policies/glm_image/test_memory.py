import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import GlmImageTransformer2DModel
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache, GlmImageForConditionalGeneration

from grpo_core.logprobs import score_hidden, vocabulary_logprobs
from grpo_core.policies.estimate import BYTES, GIB, MemoryEstimate
from grpo_core.policies.glm_image import activations
from grpo_core.policies.glm_image.architecture import build_on_meta
from grpo_core.policies.glm_image.component_configs import ComponentConfigs
from grpo_core.policies.glm_image.loading import load_pipeline
from grpo_core.policies.glm_image.memory import estimate_memory
from grpo_core.policies.glm_image.policy import FROZEN_PARTS, LANGUAGE_MODEL_LINEARS
from grpo_core.policies.glm_image.prompts import EncodedPrompts
from grpo_core.policies.glm_image.released import released_configs
from grpo_core.policies.glm_image.scoring import score_tokens
from grpo_core.policies.glm_image.sizes import ComponentSizes, component_sizes
from grpo_core.policies.trained import LoraSettings, TrainedModel, TrainingChoice, train_model
from grpo_core.records import TokenSupport
from grpo_core.sampling import Truncation, draw_tokens, truncate
from tests.grpo_core.policies.glm_image.live_bytes import PeakBytes, saved_storages

RANK, ROWS, PROMPT, TOKENS = 8, 3, 20, 100
LENGTH = PROMPT + TOKENS - 1
DTYPES = ["float32", "bfloat16"]


def tiny_estimate(sizes: ComponentSizes, **changes: Any) -> MemoryEstimate:
    plain = {
        "dtype": "float32",
        "height": 64,
        "width": 64,
        "group_size": 4,
        "prompts_per_batch": 2,
        "decode_batch_size": 4,
        "micro_batch_size": 4,
        "prompt_tokens": PROMPT,
    }
    return estimate_memory(sizes, **{**plain, **changes})


def with_layers(configs: ComponentConfigs, layers: int) -> ComponentConfigs:
    autoregressive = copy.deepcopy(configs.autoregressive)
    autoregressive.text_config.num_hidden_layers = layers
    return dataclasses.replace(configs, autoregressive=autoregressive)


def with_codes(configs: ComponentConfigs, codes: int) -> ComponentConfigs:
    autoregressive = copy.deepcopy(configs.autoregressive)
    autoregressive.text_config.vision_vocab_size += codes - autoregressive.vq_config.num_embeddings
    autoregressive.vq_config.num_embeddings = codes
    return dataclasses.replace(configs, autoregressive=autoregressive)


@pytest.fixture(scope="module")
def tiny_sizes(tiny_configs: ComponentConfigs) -> ComponentSizes:
    return component_sizes(tiny_configs, lora_rank=RANK, lora_targets=LANGUAGE_MODEL_LINEARS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_the_bytes_of_a_loaded_pipeline(tiny_folder: Path, tiny_sizes: ComponentSizes, dtype: str) -> None:
    pipeline = load_pipeline(str(tiny_folder), dtype=getattr(torch, dtype), device=torch.device("cpu"))
    estimate = tiny_estimate(tiny_sizes, dtype=dtype)

    def weighed(part: nn.Module) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in part.parameters())

    assert estimate.part("autoregressive weights") == weighed(pipeline.vision_language_encoder)
    assert estimate.part("decoder weights") == weighed(pipeline.transformer)
    assert estimate.part("autoencoder weights") == weighed(pipeline.vae)
    assert estimate.part("glyph encoder weights") == weighed(pipeline.text_encoder)


def scored_model(configs: ComponentConfigs, dtype: str, *, lora: bool, checkpointed: bool) -> TrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = GlmImageForConditionalGeneration(configs.autoregressive).to(getattr(torch, dtype))
    settings = LoraSettings(RANK, 2.0 * RANK, LANGUAGE_MODEL_LINEARS) if lora else None
    choice = TrainingChoice(settings, gradient_checkpointing=checkpointed)
    trained = train_model(base, choice, base_name="tiny", own_frozen=FROZEN_PARTS, initial_state=dict)
    trained.prepare_for_update()
    return trained


def stored_rows(support: int) -> tuple[EncodedPrompts, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(support, (ROWS, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    positions = torch.arange(PROMPT + TOKENS + 1).expand(3, ROWS, -1).contiguous()
    tokens = torch.randint(support, (ROWS, TOKENS), generator=generator)
    return EncodedPrompts(ids, mask, positions), tokens, torch.ones_like(tokens, dtype=torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lora", [True, False])
def test_training_state_is_what_adamw_and_autograd_make(tiny_configs: ComponentConfigs, dtype: str, lora: bool) -> None:
    trained = scored_model(tiny_configs, dtype, lora=lora, checkpointed=False)
    parameters = list(trained.trainable_parameters().values())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    adamw = torch.optim.AdamW(parameters)
    adamw.step()
    moments = [state[key] for state in adamw.state.values() for key in ("exp_avg", "exp_avg_sq")]
    rank, targets = (RANK, LANGUAGE_MODEL_LINEARS) if lora else (None, None)
    estimate = tiny_estimate(component_sizes(tiny_configs, lora_rank=rank, lora_targets=targets), dtype=dtype)
    assert estimate.part("optimizer moments") == sum(m.numel() * m.element_size() for m in moments)
    assert estimate.part("gradients") == sum(p.numel() * p.element_size() for p in parameters)
    if lora:
        assert estimate.part("adapters") == estimate.part("gradients")


def saved_by_layers(configs: ComponentConfigs, dtype: str, *, lora: bool) -> int:
    trained = scored_model(configs, dtype, lora=lora, checkpointed=False)
    support = configs.autoregressive.vq_config.num_embeddings
    encoded, tokens, mask = stored_rows(support)
    with saved_storages([*trained.model.parameters(), *trained.model.buffers()]) as saved:
        score_tokens(trained.model, encoded, tokens, mask, vocabulary=support, temperature=1.0)
    return sum(saved.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lora", [True, False])
def test_a_layer_keeps_what_the_formula_says(tiny_configs: ComponentConfigs, dtype: str, lora: bool) -> None:
    few, many = (saved_by_layers(with_layers(tiny_configs, layers), dtype, lora=lora) for layers in (2, 4))
    rank, targets = (RANK, LANGUAGE_MODEL_LINEARS) if lora else (None, None)
    sizes = component_sizes(tiny_configs, lora_rank=rank, lora_targets=targets)
    b = BYTES[dtype]
    expected = ROWS * LENGTH * activations.saved_bytes_per_token(sizes, b) + ROWS * LENGTH**2 * b
    assert (many - few) / 2 == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("codes", [73, 4000])
def test_a_microbatch_peaks_where_the_estimate_says(
    tiny_configs: ComponentConfigs, dtype: str, lora: bool, checkpointed: bool, codes: int
) -> None:
    configs = with_codes(with_layers(tiny_configs, 4), codes)
    trained = scored_model(configs, dtype, lora=lora, checkpointed=checkpointed)
    rank, targets = (RANK, LANGUAGE_MODEL_LINEARS) if lora else (None, None)
    sizes = component_sizes(configs, lora_rank=rank, lora_targets=targets)
    encoded, tokens, mask = stored_rows(73)  # the embedding has no more
    parameters = trained.trainable_parameters().values()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    weights = [*trained.model.parameters(), *trained.model.buffers()]
    stored = [encoded.input_ids, encoded.attention_mask, encoded.position_ids, tokens, mask]
    with PeakBytes([*weights, *gradients, *stored]) as watched:
        scored = score_tokens(trained.model, encoded, tokens, mask, vocabulary=sizes.support, temperature=1.0)
        scored.logprobs.sum().backward()
    b = BYTES[dtype]
    estimated = activations.kept_bytes(sizes, b, rows=ROWS, length=LENGTH, checkpointed=checkpointed)
    estimated += max(
        activations.layer_bytes(sizes, b, rows=ROWS, length=LENGTH, checkpointed=checkpointed),
        activations.logits_bytes(sizes, b, rows=ROWS, tokens=TOKENS, truncated=False),
    )
    # A layer frees what it kept while its backward pass goes on, which the estimate leaves out.
    assert watched.peak <= estimated <= (1.02 if codes > 1000 else 1.3) * watched.peak


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("truncated", [True, False])
def test_logits_are_the_bytes_of_the_tensors_they_pass_through(
    tiny_configs: ComponentConfigs, dtype: str, lora: bool, entropy: bool, truncated: bool
) -> None:
    rank, targets = (RANK, LANGUAGE_MODEL_LINEARS) if lora else (None, None)
    sizes = component_sizes(with_codes(tiny_configs, 4000), lora_rank=rank, lora_targets=targets)
    hidden = torch.randn(ROWS, TOKENS, sizes.hidden).to(getattr(torch, dtype)).requires_grad_()
    head = torch.randn(sizes.vocabulary, sizes.hidden).to(hidden.dtype).requires_grad_(not lora)
    hidden.grad, head.grad = torch.zeros_like(hidden), torch.zeros_like(head)
    ids, mask = torch.zeros(ROWS, TOKENS, dtype=torch.long), torch.ones(ROWS, TOKENS, dtype=torch.bool)
    support = TokenSupport(ids.flatten().int(), torch.ones_like(ids)) if truncated else None
    weight = head[: sizes.support]
    with PeakBytes([hidden, hidden.grad, head, head.grad, ids, mask]) as watched:
        scored = score_hidden(
            hidden,
            lambda states: states @ weight.T,
            ids,
            mask,
            vocabulary=sizes.support,
            temperature=0.9,
            support=support,
            entropy=entropy,
        )
        scored.logprobs.sum().backward()
    estimated = activations.logits_bytes(
        sizes, BYTES[dtype], rows=ROWS, tokens=TOKENS, entropy=entropy, truncated=truncated
    )
    assert estimated == pytest.approx(watched.peak, rel=0.03)


@pytest.mark.parametrize("lora", [True, False])
def test_the_logits_of_a_microbatch_are_never_alive_together(tiny_configs: ComponentConfigs, lora: bool) -> None:
    """4000 codes and 2400 tokens: against one forward pass that makes all logits and their log-probs."""
    configs = with_codes(tiny_configs, 4000)
    model = scored_model(configs, "float32", lora=lora, checkpointed=True).model
    encoded, tokens, mask = stored_rows(73)
    encoded, tokens, mask = encoded.repeat(8), tokens.repeat(8, 1), mask.repeat(8, 1)
    whole = tokens.numel() * 4000 * 4
    known = [*model.parameters(), *model.buffers(), encoded.input_ids, encoded.position_ids, tokens, mask]

    with PeakBytes(known) as chunked, saved_storages(known) as saved:
        scored = score_tokens(model, encoded, tokens, mask, vocabulary=4000, temperature=1.0)
        (scored.logprobs.sum() + scored.entropy.sum()).backward()
    model.zero_grad()
    with PeakBytes(known) as together:
        output = model(
            input_ids=torch.cat([encoded.input_ids, tokens[:, :-1]], 1),
            position_ids=encoded.position_ids[:, :, :LENGTH],
            use_cache=False,
        )
        logprobs = output.logits[:, -TOKENS:, :4000].log_softmax(-1)
        (logprobs.gather(-1, tokens.unsqueeze(-1)).sum() - (logprobs.exp() * logprobs).sum()).backward()
    assert max(saved.values()) < 0.2 * whole
    assert chunked.peak < 0.4 * together.peak


@pytest.mark.parametrize("truncation", [Truncation(), Truncation(20, 0.9, 0.01)], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sampling_takes_the_bytes_of_one_step(
    tiny_configs: ComponentConfigs, dtype: str, truncation: Truncation
) -> None:
    sizes = component_sizes(with_codes(tiny_configs, 4000))
    logits = torch.randn(50, sizes.vocabulary).to(getattr(torch, dtype))
    uniforms = torch.full((50,), 0.5, dtype=torch.float64)
    with PeakBytes([logits, uniforms]) as watched:
        draw_tokens(truncate(vocabulary_logprobs(logits, sizes.support, 0.9), truncation), uniforms)
    estimated = activations.sampling_bytes(sizes, BYTES[dtype], rows=50)
    assert estimated - logits.nbytes == pytest.approx(watched.peak, rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_is_the_bytes_of_a_filled_one(tiny_configs: ComponentConfigs, dtype: str) -> None:
    model = scored_model(tiny_configs, dtype, lora=False, checkpointed=False).model
    sequences, length = 8, PROMPT + 16 + 64 - 1  # a 64x64 image of the tiny model: preview and large grid
    cache = DynamicCache()
    positions = torch.arange(length).expand(3, sequences, -1)
    with torch.no_grad():
        model(
            input_ids=torch.zeros(sequences, length, dtype=torch.long),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    filled = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert tiny_estimate(component_sizes(tiny_configs), dtype=dtype).part("key-value cache") == filled


def test_released_cache_is_40_kib_a_token() -> None:
    assert activations.cache_bytes_per_token(component_sizes(released_configs()), 2) == 40 * 1024


def test_autoencoder_peaks_at_three_quarters_of_the_estimate() -> None:
    configs = released_configs()
    vae: Any = build_on_meta(configs).vae
    latents = torch.empty(2, 16, 64, 48, device="meta")
    with torch.no_grad(), PeakBytes([*vae.parameters(), latents]) as watched:
        vae.decode(latents)
    estimated = activations.vae_bytes(component_sizes(configs), 4, rows=2, height=512, width=384)
    assert estimated * 3 == watched.peak * 4


def test_denoising_peaks_near_the_estimate(tiny_configs: ComponentConfigs) -> None:
    decoder = GlmImageTransformer2DModel.from_config(dict(tiny_configs.decoder)).eval()
    sizes = component_sizes(tiny_configs)
    side, rows = 128, 2
    patches = (side // decoder.config.patch_size) ** 2
    given = {
        "hidden_states": torch.randn(rows, decoder.config.in_channels, side, side),
        "encoder_hidden_states": torch.randn(rows, 2, decoder.config.text_embed_dim),
        "prior_token_id": torch.zeros(rows, patches, dtype=torch.long),
        "prior_token_drop": torch.zeros(rows, patches, dtype=torch.bool),
        "timestep": torch.zeros(rows),
        "target_size": torch.zeros(rows, 2),
        "crop_coords": torch.zeros(rows, 2),
    }
    with torch.no_grad(), PeakBytes([*decoder.parameters(), *given.values()]) as watched:
        decoder(**given)
    estimated = activations.denoising_bytes(sizes, 4, rows=rows, height=side, width=side)
    assert 0.9 * watched.peak <= estimated <= 1.5 * watched.peak


@given(
    name=st.sampled_from(["group_size", "prompts_per_batch", "decode_batch_size", "micro_batch_size", "prompt_tokens"]),
    value=st.integers(1, 32),
    more=st.integers(1, 32),
    checkpointed=st.booleans(),
    referenced=st.booleans(),
)
def test_more_of_anything_never_needs_less(
    tiny_sizes: ComponentSizes, name: str, value: int, more: int, checkpointed: bool, referenced: bool
) -> None:
    fixed = {"gradient_checkpointing": checkpointed, "reference_on_device": referenced}
    less = tiny_estimate(tiny_sizes, **{name: value}, **fixed)
    greater = tiny_estimate(tiny_sizes, **{name: value + more}, **fixed)
    assert greater.rollout_peak >= less.rollout_peak
    assert greater.update_peak >= less.update_peak
    assert all(greater.part(part.name) >= part.bytes for part in less.parts)


def test_checkpointing_and_a_reference_change_what_they_should(tiny_configs: ComponentConfigs) -> None:
    full = component_sizes(tiny_configs)
    plain, checkpointed = tiny_estimate(full), tiny_estimate(full, gradient_checkpointing=True)
    assert checkpointed.part("activations") < plain.part("activations")
    assert checkpointed.rollout_peak == plain.rollout_peak
    referenced = tiny_estimate(full, reference_on_device=True)
    assert referenced.part("reference model") == full.language_model * 4
    assert plain.part("reference model") == 0


def test_rows_tell_every_part_and_the_peaks(tiny_sizes: ComponentSizes) -> None:
    estimate = tiny_estimate(tiny_sizes)
    rows = estimate.rows()
    assert [name for name, _, _ in rows[:-3]] == [part.name for part in estimate.parts]
    assert len({name for name, _, _ in rows}) == len(rows)
    told = {name: gib for name, gib, _ in rows}
    always = sum(part.bytes for part in estimate.parts if part.phase == "always")
    update = sum(part.bytes for part in estimate.parts if part.phase in ("update", "backward"))
    assert told["peak of the update stage"] == pytest.approx((always + update) / GIB)
    assert told["needed"] == pytest.approx(1.15 * max(estimate.rollout_peak, estimate.update_peak) / GIB, rel=1e-6)
