"""Every model that is called tried passes the trial; one that is broken is refused by it, with the reason."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_core.errors import InputError
from grpo_core.policies import kv_cache
from grpo_core.policies.causal_lm.model_types import REFUSED, TRIED, TRIED_WITH_IMAGES, refuse_known
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.diffusers.source_images import SourceArgument
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.policies.trial import TOLERANCE, Trial, try_policy
from tests.grpo_core.policies.causal_lm.model_types import (
    change_inputs,
    configurations,
    make_model,
    small_model,
    small_policy,
)
from tests.grpo_core.policies.diffusers.tiny_pipelines import MAKE, SavedFolder, load, settings
from tests.grpo_core.policies.vision_lm.tiny_families import KINDS, make_policy

pytestmark = [
    # Ernie's pipeline gives its scheduler a tensor of sigmas.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # Chroma's transformer imports it from where it was.
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
]
FULL, LORA = TrainingChoice(None, reference="none"), TrainingChoice(LoraSettings(rank=2, alpha=4.0))


def tried(kind: str, policy: Any) -> Trial:
    own = policy.settings
    found = try_policy(kind, "some/model", policy)
    assert found is not None
    assert policy.settings == own
    return found


def quick(names: Any, *chosen: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in names]


# --- what is called tried


def small(model_type: str) -> Iterator[Any]:
    """Some magnify the rounding of fp32 where they are so narrow."""
    yield small_model(model_type)
    yield small_model(model_type).double()


# Caches, heads, positions and routers of every kind that the sampler or the scorer could trip over.
@pytest.mark.parametrize("model_type", quick(sorted(TRIED), "bert", "electra", "llama4_text", "phimoe", "minimax"))
def test_a_type_of_language_model(model_type: str) -> None:
    for model in small(model_type):
        try:
            found = tried("causal_lm", small_policy(model, LORA))
        except InputError:
            if model.dtype == torch.float64:
                raise
        else:
            break
    assert found.difference < TOLERANCE["tokens"]


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_an_architecture_in_32_and_in_16_bits(name: str) -> None:
    model = make_model(name)
    assert tried("causal_lm", small_policy(model, FULL, stop=("a",), top_k=3)).difference < 1e-5
    assert tried("causal_lm", small_policy(model.bfloat16(), FULL)).difference < 2


# All types that run and whose forward pass computes them where the configuration asks for it.
ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "gpt_oss")
SLOWLY_ROUTED = (
    *("ernie4_5_moe", "flex_olmo", "flint", "granitemoe_swa", "granitemoeshared", "jetmoe", "laguna", "mellum"),
    *("minimax", "minimax_m2", "minimax_m3_vl_text"),
)


@pytest.mark.parametrize("model_type", quick((*ROUTED, *SLOWLY_ROUTED), "mixtral", "olmoe", "gpt_oss"))
def test_losses_of_routers_are_left_out(model_type: str) -> None:
    tried("causal_lm", small_policy(small_model(model_type, output_router_logits=True), FULL))


# With deepstack, with a projector that is one parameter, with a layer that nothing reads, and with tiles.
@pytest.mark.parametrize("kind", quick(KINDS, "qwen3_vl", "gemma3", "llava", "internvl"))
def test_a_family_that_reads_images(kind: str) -> None:
    assert set(KINDS) == TRIED_WITH_IMAGES
    assert tried("vision_lm", make_policy(kind)).difference < 1e-5


@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("name", quick(MAKE, "sd3", "flux", "z_image", "flux_kontext", "qwen_image_edit_plus"))
def test_a_class_of_pipeline(saved_folder: SavedFolder, name: str) -> None:
    assert tried("diffusers", load(saved_folder(name), settings(name))).difference < 1e-6


@pytest.mark.parametrize("precision", ["dtype", "autocast"])
def test_a_pipeline_in_16_bits(saved_folder: SavedFolder, precision: str) -> None:
    policy = load(saved_folder("sd3"), settings("sd3"), **{precision: torch.bfloat16})
    assert tried("diffusers", policy).difference < 1e-5


# --- whether a prompt is computed once


def test_prompts_are_shared_where_values_and_gradients_are_those_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs alone would not show that the prompt's values are detached; the run goes on with whole rows."""
    policy = small_policy(make_model("llama"), TrainingChoice(LORA.lora, gradient_checkpointing=True))
    assert tried("causal_lm", policy).prompts == "a group's prompt is computed once"
    assert policy.trained.shares_prompts
    read = kv_cache._of_rows
    monkeypatch.setattr(kv_cache, "_of_rows", lambda values, rows: read(values, rows).detach())
    assert "gradients with a shared prompt differ by" in tried("causal_lm", policy).prompts
    assert not policy.trained.shares_prompts
    monkeypatch.setattr(kv_cache, "_of_rows", lambda values, rows: read(values.flip(2), rows))
    assert "log-probs with a shared prompt differ by" in tried("causal_lm", policy).prompts
    monkeypatch.setattr(kv_cache, "_of_rows", read)
    for layer in policy._model.model.layers:
        # As transformers has it: a layer that is computed again drops the prompt.
        layer._can_checkpoint_with_cache = False
    assert "log-probs with a shared prompt differ by" in tried("causal_lm", policy).prompts


@pytest.mark.slow
def test_a_model_with_a_cache_of_its_own_computes_whole_rows() -> None:
    policy = small_policy(small_model("minimax"), LORA)
    assert tried("causal_lm", policy).prompts.startswith("each row computes its prompt: a trial of it fails")
    assert not policy.trained.shares_prompts


# --- what is broken


def refused(kind: str, policy: Any, reason: str) -> None:
    own = policy.settings
    with pytest.raises(InputError, match=f"cannot be trained here: .*{reason}") as caught:
        try_policy(kind, "some/model", policy)
    assert (caught.value.place, caught.value.value, policy.settings) == ("policy.model", "some/model", own)


def detach(module: Any, inputs: Any, found: Any) -> Any:
    return found.detach()


MISTAKES: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "positions of padded prompts": ("gpt2", lambda given: given.pop("position_ids", None), "differ"),
    "a window that the cache forgets": ("gemma2", lambda given: given.update(past_key_values=None), "differ"),
    "a call that fails": ("llama", lambda given: given.update(input_ids=None), "a trial of it fails"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_log_probs_of_tokens(mistake: str) -> None:
    name, change, reason = MISTAKES[mistake]
    policy = small_policy(make_model(name), FULL)
    tried("causal_lm", policy)
    change_inputs(policy._model, change)
    refused("causal_lm", policy, reason)


def test_a_head_without_gradients_and_one_with_noise() -> None:
    policy = small_policy(make_model("llama"), FULL)
    handle = policy._model.get_output_embeddings().register_forward_hook(detach)
    refused("causal_lm", policy, "no gradient")
    handle.remove()
    noise = torch.Generator().manual_seed(0)
    policy._model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, found: found + 9 * torch.rand(found.shape, generator=noise)
    )
    refused("causal_lm", policy, "same seed")


VISION_MISTAKES: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "types of ids left out": (
        "paligemma",
        # A plain pass has no positions.
        lambda given: given.get("position_ids") is not None and given.pop("token_type_ids", None),
        "differ",
    ),
    "images left out on both sides": (
        "llava",
        lambda given: [given.pop(name, None) for name in ("mm_encoder_outputs", "pixel_values")],
        "does not see",
    ),
}


@pytest.mark.parametrize(("kind", "change", "reason"), VISION_MISTAKES.values(), ids=VISION_MISTAKES)
def test_wrong_log_probs_of_models_with_images(kind: str, change: Callable[[Any], object], reason: str) -> None:
    policy = make_policy(kind)
    change_inputs(policy._model, change)
    refused("vision_lm", policy, reason)


def test_a_projector_of_zeros_is_blind() -> None:
    """Parity alone would pass it: both sides see nothing."""
    policy = make_policy("gemma3")
    with torch.no_grad():
        policy._model.model.multi_modal_projector.mm_input_projection_weight.zero_()
    refused("vision_lm", policy, "does not see its images")


# A class whose needs are not met, and what the reason names.
UNMET: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "latents in another form": ("flux2_klein", {"spatial_latents": False}, "a trial of it fails"),
    "sources that are large enough": ("flux2_klein", {"sources": SourceArgument(most=1)}, "too small"),
    "prompts that a language model rewrites": ("ernie_image", {"switched_off": ()}, "same seeds"),
}


@pytest.mark.parametrize("case", UNMET)
def test_needs_of_a_class_that_are_not_met(saved_folder: SavedFolder, case: str) -> None:
    name, changes, reason = UNMET[case]
    policy = load(saved_folder(name), settings(name))
    known = policy.denoising.saved
    policy.denoising.saved = replace(known, pipeline_class=replace(known.pipeline_class, **changes))
    refused("diffusers", policy, reason)


def mixed(module: Any, inputs: Any, found: Any) -> Any:
    return (found[0] - 0.1 * found[0].mean(0, keepdim=True), *found[1:])


HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "rows are mixed": (mixed, "differ by"),
    "other velocities with gradients": (
        lambda module, inputs, found: (found[0] * (1.1 if torch.is_grad_enabled() else 1.0), *found[1:]),
        "differ by",
    ),
    "noise of its own": (
        lambda module, inputs, found: (found[0] + torch.rand_like(found[0]), *found[1:]),
        "same seeds",
    ),
    "no gradients": (lambda module, inputs, found: (found[0].detach(), *found[1:]), "no gradient"),
}


@pytest.mark.parametrize("case", HOOKS)
def test_wrong_steps(saved_folder: SavedFolder, case: str) -> None:
    hook, reason = HOOKS[case]
    policy: DiffusersPolicy = load(saved_folder("sd3"), settings("sd3"))
    policy.denoising.pipeline.transformer.register_forward_hook(hook)
    refused("diffusers", policy, reason)


def test_a_pipeline_that_ignores_its_source(saved_folder: SavedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(saved_folder("flux2_klein"), settings("flux2_klein"))
    prepare = policy.denoising.pipeline.prepare_image_latents

    def blind(*args: Any, **kwargs: Any) -> Any:
        latents, ids = prepare(*args, **kwargs)
        return torch.zeros_like(latents), ids

    monkeypatch.setattr(policy.denoising.pipeline, "prepare_image_latents", blind)
    refused("diffusers", policy, "does not look at it")


# --- what is known before weights are read


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("qwen3_next", r"LinearAttentionLayer"),
        ("mamba", "LinearAttentionLayer"),
        ("falcon_h1", "LinearAttentionAndFullAttentionLayer"),
        ("deepseek_v4", "one cache"),
        ("openai-gpt", "no cache of keys and values"),
        ("roberta", "no explicit positions"),
    ],
)
def test_a_type_is_refused_by_its_configuration(model_type: str, reason: str) -> None:
    config = next(iter(configurations(model_type)), SimpleNamespace(model_type=model_type))
    with pytest.raises(InputError, match=rf"A {model_type} model cannot be trained here: .*{reason}") as caught:
        refuse_known("some/model", config)
    assert (caught.value.place, caught.value.value) == ("policy.model", "some/model")


def test_a_hybrid_of_attention_alone_and_tried_types_are_not_refused() -> None:
    assert not TRIED & REFUSED.keys()
    (config, *_) = configurations("granitemoehybrid")
    config.layer_types = ["attention"] * config.num_hidden_layers
    for each in (config, configurations("gemma3n_text")[0]):
        refuse_known("some/model", each)
