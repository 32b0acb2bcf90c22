"""An oracle for memory: the most bytes alive at once, seen by watching real operations."""

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, GlmImageForConditionalGeneration

from grpo_core.policies.causal_lm.sampling_scoring import score_completions
from grpo_core.policies.encoded_prompts import EncodedPrompts
from grpo_core.policies.estimate import MemoryPart, Workload, estimate_resources, training_parts
from grpo_core.policies.glm_image.family import FAMILY
from grpo_core.policies.glm_image.loading import (
    LANGUAGE_MODEL_LINEARS,
    RELEASED_MODEL,
    load_pipeline,
    read_token_config,
    train_half,
)
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.sizes import cached_values, shown_count, token_sizes
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.streams import ImageSize
from tests.grpo_core.policies.causal_lm.model_types import CONFIGS, make_model
from tests.tiny_policies import MODEL


class PeakBytes(TorchDispatchMode):
    """Counts the storages that operations under it make, until each is freed."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.alive += size
                weakref.finalize(storage, self._forget, key, size)
        self.peak = max(self.peak, self.alive)
        return output


RANK, ROWS, PROMPT, TOKENS = 8, 3, 20, 100
LENGTH = PROMPT + TOKENS - 1
DTYPES = ["float32", "bfloat16"]
WORKLOAD = Workload("float32", group_size=4, prompts_per_batch=2, micro_batch_size=ROWS, eight_bit_optimizer=False)
SETTINGS = GlmImageSettings(height=64, width=64)
CONFIG: Any = read_token_config(str(MODEL))


def choice_of(lora: bool, **options: Any) -> TrainingChoice:
    return TrainingChoice(LoraSettings(RANK, 2.0 * RANK, LANGUAGE_MODEL_LINEARS) if lora else None, **options)


def trained_model(config: Any, choice: TrainingChoice, dtype: str = "float32") -> TrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = GlmImageForConditionalGeneration(config).to(getattr(torch, dtype))
    trained = train_half("tokens", base, choice, "tiny", initial_state=dict)
    trained.prepare_for_update()
    return trained


def sized(parts: Iterable[MemoryPart]) -> Mapping[str, int]:
    return {part.name: part.bytes for part in parts}


def training_of(trained: TrainedModel, config: Any, choice: TrainingChoice, dtype: Any) -> Mapping[str, int]:
    codes = config.vq_config.num_embeddings
    sizes = token_sizes(trained, config.text_config, SETTINGS, PROMPT, TOKENS, vocabulary=codes)
    return sized(training_parts("tokens", sizes, choice, dataclasses.replace(WORKLOAD, dtype=dtype)))


def bytes_of(parameters: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_the_bytes_of_a_loaded_pipeline(dtype: Any) -> None:
    pipeline = load_pipeline(str(MODEL), dtype=getattr(torch, dtype), device=torch.device("cpu"))
    workload = dataclasses.replace(WORKLOAD, dtype=dtype)
    choices = {"tokens": choice_of(lora=True)}
    memory = estimate_resources("glm_image", str(MODEL), SETTINGS, choices, {"tokens": workload}).memory.parts
    networks: dict[str, nn.Module] = {
        "autoregressive weights": pipeline.vision_language_encoder,
        "decoder weights": pipeline.transformer,
        "autoencoder weights": pipeline.vae,
        "glyph encoder weights": pipeline.text_encoder,
    }
    for name, network in networks.items():
        assert sized(memory)[name] == bytes_of(network.parameters())


@pytest.mark.parametrize(("dtype", "lora"), [("float32", True), ("bfloat16", False)])
def test_training_state_is_what_adamw_and_autograd_make(dtype: str, lora: bool) -> None:
    choice = choice_of(lora, reference="none" if lora else "device")
    trained = trained_model(CONFIG, choice, dtype)
    parameters = list(trained.trainable_parameters().values())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    adamw = torch.optim.AdamW(parameters)
    adamw.step()
    moments = [state[key] for state in adamw.state.values() for key in ("exp_avg", "exp_avg_sq")]
    parts = training_of(trained, CONFIG, choice, dtype)
    assert parts["tokens moments"] == bytes_of(moments)
    assert parts["tokens gradients"] == bytes_of(parameters)
    assert parts["tokens adapters" if lora else "tokens reference"] == bytes_of(parameters)


@pytest.mark.parametrize("lora", [True, False])
def test_a_checkpoint_has_what_is_saved(lora: bool) -> None:
    choice = choice_of(lora)
    trained = trained_model(CONFIG, choice)
    parameters = bytes_of(trained.trainable_parameters().values())
    workload = dataclasses.replace(WORKLOAD, averages=1)
    found = estimate_resources("glm_image", str(MODEL), SETTINGS, {"tokens": choice}, {"tokens": workload})
    saved = parameters if lora else bytes_of(trained.model.parameters())
    assert found.checkpoint == 2 * saved + 2 * parameters


def stored_rows(support: int) -> tuple[EncodedPrompts, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(support, (ROWS, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    positions = torch.arange(PROMPT).expand(3, ROWS, -1).contiguous()
    tokens = torch.randint(support, (ROWS, TOKENS), generator=generator)
    return EncodedPrompts(ids, mask, positions), tokens, torch.ones_like(tokens, dtype=torch.bool)


@pytest.mark.parametrize(
    ("dtype", "lora", "checkpointed"),
    [("float32", True, False), ("float32", True, True), ("bfloat16", False, True), ("float32", False, False)],
)
def test_a_backward_pass_peaks_near_the_estimate(dtype: str, lora: bool, checkpointed: bool) -> None:
    choice = choice_of(lora, gradient_checkpointing=checkpointed)
    trained = trained_model(CONFIG, choice, dtype)
    codes = CONFIG.vq_config.num_embeddings
    encoded, tokens, mask = stored_rows(codes)
    for parameter in trained.trainable_parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in trained.trainable_parameters().values() if parameter.grad is not None]
    weights = [*trained.model.parameters(), *trained.model.buffers()]
    stored = [encoded.input_ids, encoded.attention_mask, encoded.position_ids, tokens, mask]
    with PeakBytes([*weights, *gradients, *stored]) as watched:
        scored = score_completions(
            trained.model.get_base_model() if lora else trained.model,
            encoded,
            tokens,
            mask,
            vocabulary=codes,
            temperature=1.0,
            support=None,
            entropy="differentiable",
            whole_logits=False,
        )
        scored.logprobs.sum().backward()
    estimated = training_of(trained, CONFIG, choice, dtype)["tokens activations"]
    # The estimate is for blocks with a wider MLP than the tiny model's.
    assert 1 < estimated / watched.peak < 2.1


def test_autocast_keeps_its_copies_of_trained_weights_and_a_cache_in_32_bits() -> None:
    """A pass leaves them behind, beside the cache, and the next one makes none."""
    choice, ids = choice_of(lora=False), torch.zeros(1, 8, dtype=torch.long)
    trained = trained_model(CONFIG, choice)
    workload = dataclasses.replace(WORKLOAD, autocast="bfloat16")
    parts = sized(
        training_parts("tokens", token_sizes(trained, CONFIG.text_config, SETTINGS, PROMPT, TOKENS), choice, workload)
    )
    kept, known = [], [*trained.model.parameters(), *trained.model.buffers(), ids]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), PeakBytes(known) as watched:
        for _ in range(2):
            cache = trained.model(input_ids=ids, position_ids=ids.expand(3, 1, -1), use_cache=True).past_key_values
            assert {part.dtype for each in cache.layers for part in (each.keys, each.values)} == {torch.float32}
            del cache
            kept.append(watched.alive)
    assert kept[0] == kept[1]
    # Norms, embeddings and the vision tower are not cast.
    assert 0.5 < kept[0] / parts["tokens weights in bfloat16"] <= 1


def test_what_autocast_casts_is_gone_before_the_optimizer_step() -> None:
    """It makes a tensor of 4 bytes for each trained value, twice what autocast keeps of it beside activations."""
    choice = choice_of(lora=False)
    trained = trained_model(CONFIG, choice)
    sizes = token_sizes(trained, CONFIG.text_config, SETTINGS, 1, 1, vocabulary=8)
    step = 4 * sum(parameter.numel() for parameter in trained.trainable_parameters().values())
    needed = []
    for rows in (1, 8, 64, 512):
        workload = dataclasses.replace(WORKLOAD, autocast="bfloat16", micro_batch_size=rows)
        parts = [part for part in training_parts("tokens", sizes, choice, workload) if "tokens update" in part.phases]
        needed.append(sum(part.bytes for part in parts if not part.exact))
        named = sized(parts)
        cast = 0 if "tokens optimizer step" in named else step // 2
        assert named.get("tokens weights in bfloat16", 0) == cast
    assert min(needed) == step < max(needed)
    assert needed == sorted(needed)


@torch.no_grad()
def test_a_cache_is_the_bytes_of_a_filled_one() -> None:
    choice = choice_of(lora=False)
    trained = trained_model(CONFIG, choice)
    ids, cache = torch.zeros(8, LENGTH, dtype=torch.long), DynamicCache()
    positions = torch.arange(LENGTH).expand(3, 8, -1)
    trained.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    filled = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert 8 * LENGTH * cached_values(CONFIG.text_config) * 4 == filled


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_a_cache_of_any_language_model_is_estimated(kind: str) -> None:
    # Within Gemma 2's window, where every layer keeps all.
    ids = torch.zeros(8, 5, dtype=torch.long)
    model = make_model(kind)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert 8 * 5 * cached_values(CONFIGS[kind].get_text_config()) * 4 == held


def test_the_autoencoder_peaks_at_three_quarters_of_the_estimate() -> None:
    vae, size = FAMILY.build_on_meta(RELEASED_MODEL, "vae"), ImageSize(384, 512)
    latents = torch.empty(1, 16, 64, 48, device="meta")
    with torch.no_grad(), PeakBytes([*vae.parameters(), latents]) as watched:
        vae.decode(latents)
    settings = GlmImageSettings(height=size.height, width=size.width, decode_batch_size=1)
    found = estimate_resources("glm_image", RELEASED_MODEL, settings, {"tokens": choice_of(True)}, {"tokens": WORKLOAD})
    assert sized(found.memory.parts)["decoding"] * 3 == watched.peak * 4


def test_images_are_decoded_at_once_or_one_by_one() -> None:
    """Four images of 512 x 512 pixels are decoded together; of five, one is at work."""

    def decoding(rows: int) -> int:
        settings = GlmImageSettings(height=512, width=512, decode_batch_size=rows)
        workload, choices = dataclasses.replace(WORKLOAD, group_size=8), {"tokens": choice_of(True)}
        found = estimate_resources("glm_image", RELEASED_MODEL, settings, choices, {"tokens": workload})
        return sized(found.memory.parts)["decoding"]

    assert decoding(5) < decoding(4) / 2


def test_numbers_of_parameters_have_the_unit_that_they_are_read_in() -> None:
    counts = {393_984: "0.394 M", 42_000_000: "42 M", 999_400_000: "999 M", 999_500_000: "1 B", 7_615_616_512: "7.62 B"}
    assert {count: shown_count(count) for count in counts} == counts
