"""GLM-Image as a policy: its reference, its modes, and grids that ended early."""

from dataclasses import replace

import pytest
import torch
from diffusers import GlmImagePipeline
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.policies.glm_image.loading import FROZEN_PARTS
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import TokenBatch
from grpo_core.rollouts.records import SampledTokens
from grpo_core.rollouts.streams import ImageSize
from tests.tiny_policies import LORA, MODEL, PROMPTS, build_policy, render

CPU = torch.device("cpu")


def loaded(choice: TrainingChoice) -> GlmImagePolicy:
    settings = GlmImageSettings(height=32, width=32, num_inference_steps=2, guidance_scale=1.0)
    return GlmImagePolicy.load(str(MODEL), settings, {"tokens": choice}, dtype=torch.float32, device=CPU)


def drawn(policy: GlmImagePolicy) -> SampledTokens:
    return policy.tokens.sample(PROMPTS[1:3], group_size=2, seeds=range(4))


def gradients(policy: GlmImagePolicy, tokens: TokenBatch) -> dict[str, Tensor]:
    """Of the sum of log-probs, by every trained parameter."""
    parameters = policy.tokens.trainable_parameters()
    found = torch.autograd.grad(policy.tokens.logprobs(tokens).logprobs.sum(), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


# --- what is trained


def test_adapters_are_on_the_language_model_and_change_nothing_yet(shipped_pipeline: GlmImagePipeline) -> None:
    policy, config = loaded(TrainingChoice(LORA, seed=3)), shipped_pipeline.vision_language_encoder.config
    parameters = policy.tokens.trainable_parameters()
    assert len(parameters) == 2 * 6 * config.text_config.num_hidden_layers
    assert all("language_model.layers" in name and "lora_" in name for name in parameters)
    assert policy.tokens.vocabulary == config.vq_config.num_embeddings
    sampled = drawn(policy)
    rows = zip(sampled.actions.prompts, sampled.actions.sizes, strict=True)
    assert sampled.prompt_lengths.tolist() == [
        policy.tokens.encode([prompt], [size], None).length for prompt, size in rows
    ]
    reference = policy.tokens.reference_logprobs(sampled.actions)
    torch.testing.assert_close(reference, sampled.rollout_logprobs, rtol=0, atol=1e-4)


def test_all_of_the_language_model_is_trained_and_nothing_else(shipped_pipeline: GlmImagePipeline) -> None:
    policy = loaded(TrainingChoice(lora=None))
    names = {name for name, _ in shipped_pipeline.vision_language_encoder.named_parameters()}
    trained = policy.tokens.trainable_parameters().keys()
    assert trained == {name for name in names if name.startswith(("model.language_model.", "lm_head."))}
    assert all(name.startswith(FROZEN_PARTS) for name in names - trained)
    assert all(gradient.abs().sum() > 0 for gradient in gradients(policy, drawn(policy).actions).values())


def test_a_size_the_model_cannot_draw_is_refused(shipped_pipeline: GlmImagePipeline) -> None:
    policy = build_policy(shipped_pipeline)
    with pytest.raises(InputError) as refused:
        policy.sample_with(replace(policy.settings, width=33))
    assert (refused.value.place, refused.value.value) == ("rollout.width and height", "33x32")
    assert policy.settings.width == 32


# --- the reference


@pytest.mark.parametrize("checkpointing", [True, False])
def test_scoring_by_the_reference_leaves_the_gradients_alone(
    shipped_pipeline: GlmImagePipeline, checkpointing: bool
) -> None:
    """The adapters are switched off and on between the forward and the backward pass."""
    policy = build_policy(shipped_pipeline, disturbed=0.02, gradient_checkpointing=checkpointing)
    tokens = drawn(policy).actions
    policy.tokens.prepare_for_update()
    expected = gradients(policy, tokens)
    scored = policy.tokens.logprobs(tokens).logprobs.sum()
    assert not policy.tokens.reference_logprobs(tokens).requires_grad
    scored.backward()
    for name, parameter in policy.tokens.trainable_parameters().items():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name])


# --- modes


def test_sampling_in_the_update_mode_keeps_its_cache(shipped_pipeline: GlmImagePipeline) -> None:
    """A checkpointed layer drops the cache it is given; the sampler would see one token at a time."""
    policy = build_policy(shipped_pipeline, gradient_checkpointing=True, disturbed=0.02)
    expected = drawn(policy)
    policy.tokens.prepare_for_update()
    assert torch.equal(drawn(policy).actions.token_ids, expected.actions.token_ids)


# --- grids that ended early


SHORT = 7


def shortened(sampled: SampledTokens, garbage: int) -> TokenBatch:
    """The last tokens of every other row were never written; these ids stand in their place."""
    tokens = sampled.actions
    mask = tokens.loss_mask.clone()
    mask[::2, -SHORT:] = False
    return replace(tokens, token_ids=torch.where(mask, tokens.token_ids, garbage), loss_mask=mask)


def test_what_stands_after_the_end_does_not_matter(shipped_pipeline: GlmImagePipeline) -> None:
    """The id of the start, and ids that the model does not have."""
    policy = build_policy(shipped_pipeline, disturbed=0.02)
    sampled = drawn(policy)
    tokens = shortened(sampled, 0)
    scored, clean = policy.tokens.logprobs(tokens), gradients(policy, tokens)
    expected = torch.where(tokens.loss_mask, sampled.rollout_logprobs, 0.0)
    torch.testing.assert_close(scored.logprobs.detach(), expected, rtol=0, atol=1e-4)
    assert (scored.logprobs[~tokens.loss_mask] == 0).all()
    assert (scored.entropy[~tokens.loss_mask] == 0).all()
    images = [image.tobytes() for image in render(policy, tokens, [1] * 4)]
    for garbage in (73, -1, 16385):
        tokens = shortened(sampled, garbage)
        for name, gradient in gradients(policy, tokens).items():
            assert torch.equal(gradient, clean[name]), garbage
        assert [image.tobytes() for image in render(policy, tokens, [1] * 4)] == images, garbage


def test_a_batch_cut_to_its_longest_row_is_drawn_as_the_full_one(shipped_pipeline: GlmImagePipeline) -> None:
    policy = build_policy(shipped_pipeline)
    tokens = shortened(drawn(policy), 0).select([0, 2])
    cut = replace(tokens, token_ids=tokens.token_ids[:, :-SHORT], loss_mask=tokens.loss_mask[:, :-SHORT])
    images = [render(policy, batch, [1, 2]) for batch in (tokens, cut)]
    assert [image.tobytes() for image in images[0]] == [image.tobytes() for image in images[1]]


@pytest.mark.parametrize("mask", ["none", "first"])
def test_rows_with_no_or_one_token_are_scored_and_drawn(shipped_pipeline: GlmImagePipeline, mask: str) -> None:
    policy = build_policy(shipped_pipeline)
    sampled = drawn(policy)
    loss_mask = torch.zeros_like(sampled.actions.loss_mask)
    loss_mask[:, 0] = mask == "first"
    tokens = replace(sampled.actions, token_ids=sampled.actions.token_ids.clone(), loss_mask=loss_mask)
    scored = policy.tokens.logprobs(tokens).logprobs.detach()
    expected = torch.where(loss_mask, sampled.rollout_logprobs, 0.0)
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-4)
    assert len(render(policy, tokens, [1] * 4)) == 4


def test_more_tokens_than_a_image_has_are_refused(shipped_pipeline: GlmImagePipeline) -> None:
    policy = build_policy(shipped_pipeline)
    tokens = policy.tokens.sample(PROMPTS[:2], group_size=1, seeds=range(2), size=ImageSize(64, 64)).actions
    tokens = replace(tokens, sizes=(*tokens.sizes[1:], ImageSize(32, 32)))
    for use in (policy.tokens.logprobs, lambda batch: render(policy, batch, [1] * 2)):
        with pytest.raises(InputError, match="32x32") as refused:
            use(tokens)
        assert (refused.value.place, refused.value.value) == ("token_ids", 80)


@torch.no_grad()
def difference(policy: GlmImagePolicy, sampled: SampledTokens) -> Tensor:
    return (policy.tokens.logprobs(sampled.actions).logprobs - sampled.rollout_logprobs).abs()


def test_adapters_on_the_output_head_are_sampled_scored_and_trained(shipped_pipeline: GlmImagePipeline) -> None:
    lora = LoraSettings(4, 8.0, r"lm_head|.*layers\.0\.mlp\.down_proj")
    policy = build_policy(shipped_pipeline, lora=lora, disturbed=0.1)
    policy.tokens.trained.model.double()
    sampled = drawn(policy)
    assert float(difference(policy, sampled).max()) < 1e-5
    assert float((policy.tokens.reference_logprobs(sampled.actions) - sampled.rollout_logprobs).abs().max()) > 0.01
    parameters = policy.tokens.trainable_parameters()
    found = torch.autograd.grad(policy.tokens.logprobs(sampled.actions).logprobs.sum(), list(parameters.values()))
    heads = [gradient for name, gradient in zip(parameters, found, strict=True) if "lm_head" in name]
    assert len(heads) == 2
    assert all(gradient.abs().sum() > 0 for gradient in heads)


def test_state_of_another_caller_changes_nothing(shipped_pipeline: GlmImagePipeline) -> None:
    policy = build_policy(shipped_pipeline, width=64)
    sampled = drawn(policy)
    policy.tokens._base.model.rope_deltas, policy.tokens._base.model._prefill_len = torch.full((1, 1), 5), 3
    policy.tokens._base.model._cached_decode_position_ids = torch.full((1, 3, 43), 5)
    assert torch.equal(drawn(policy).actions.token_ids, sampled.actions.token_ids)
    assert float(difference(policy, sampled).max()) < 1e-4


def test_half_precision_over_fp32_weights_agrees_in_half_precision(shipped_pipeline: GlmImagePipeline) -> None:
    policy = build_policy(shipped_pipeline, autocast=torch.bfloat16, disturbed=0.02)
    sampled = drawn(policy)
    assert float(difference(policy, sampled).max()) < 0.1
    assert 1e-3 < float(difference(build_policy(shipped_pipeline, disturbed=0.02), sampled).max()) < 0.3
