"""Whether a loaded model can be trained: it samples a little, and what an update would score is compared with that.

A language model writes a few tokens, a pipeline makes two steps. Parity alone would pass a model that looks at no
image, or that reads padding as text, so another image has to change log-probs, and those of tokens are compared with
one plain forward pass over each row alone.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from grpo_core.errors import InputError, first_line
from grpo_core.logprobs import gather_logprobs, vocabulary_logprobs
from grpo_core.parity import ParityTolerance, of_rounding
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.shared_trial import try_shared_prompts
from grpo_core.policies.trained.quantization import quantized_layers
from grpo_core.rollouts.actions import DenoisingBatch, Sources, TokenBatch
from grpo_core.rollouts.images import SourceImage, encode_png
from grpo_core.rollouts.records import GroupRequest, RolloutGroup, SampledTokens
from grpo_core.rollouts.streams import ImageSize

if TYPE_CHECKING:
    from grpo_core.policies.causal_lm.policy import CausalLMPolicy
    from grpo_core.policies.diffusers.policy import DiffusersPolicy

TOLERANCE = {"tokens": 1e-3, "steps": 1e-4}
"""In nats (of latents, their mean difference), in fp32 and above: rounding is a few millionths, another mask tenths."""

STEPS_IN_16_BITS = 1e-2
TRIES = 3
"""Rounding sends a token to another expert now and then; a fault is there with every seed."""

BLIND = 1e-4
"""By how many nats another image has to change the log-prob of a token at least."""

_TEXTS = ("What is it?", "And the colours of it, one after another?", "No image.")
_SIZES = (ImageSize(64, 64), ImageSize(112, 84))
_SHORT: Mapping[str, Any] = {
    # Four tokens.
    **{"max_completion_length": 4, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "stop": ()},
    # Two steps, the first of them with noise.
    **{"num_inference_steps": 2, "sde_type": "flow_grpo", "noise_level": 0.7, "logprob_reduction": "mean"},
    **{"sde_window": "first", "sde_window_size": 1, "sde_window_range": (0, 1)},
}


@dataclass(frozen=True)
class Trial:
    """The seconds that it took, and the largest difference, in nats, from log-probs while sampling.

    `prompts` says whether an update computes a group's prompt once, and why if not; empty for denoising.
    """

    seconds: float
    difference: float
    prompts: str = ""


class _RefusedError(Exception):
    """Why a model cannot be trained."""


def try_policy(kind: str, model: str, policy: Any) -> Trial | None:
    """Sample and score a little with the settings that a policy has; it is the same afterwards.

    None for GLM-Image: it has one architecture, which this project's tests try. InputError if the model cannot be
    sampled and scored here, or does not see its images.
    """
    if kind == "glm_image":
        return None
    begun, own = time.perf_counter(), policy.settings
    at_once = min(2, getattr(own, "decode_batch_size", 2))
    try:
        policy.sample_with(policy_family(kind).settings({**vars(own), **_SHORT, "decode_batch_size": at_once}))
        with torch.random.fork_rng(devices=[]):
            if kind == "diffusers":
                difference, prompts = _try_steps(policy), ""
            else:
                difference, prompts = _try_tokens(policy, TRIES), _try_shared(policy)
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Its own code may raise anything on arguments that it does not expect.
        reason = str(error) if isinstance(error, _RefusedError) else f"a trial of it fails ({first_line(error)})"
        page = "docs/denoising.md" if kind == "diffusers" else "docs/models.md"
        hint = f"It cannot be trained here: {reason}. {page} lists those that can."
        raise InputError("policy.model", model, hint) from error
    finally:
        policy.sample_with(own)
    return Trial(time.perf_counter() - begun, difference, prompts)


def picture(size: ImageSize, turned: bool = False) -> SourceImage:
    """Return a picture of stripes, or of other stripes, so that no part of it is alike."""
    ramp = Image.linear_gradient("L").resize(size)
    across = Image.linear_gradient("L").rotate(90).resize(size)
    stripes = across.point([255 * (level // 16 % 2) for level in range(256)])
    return SourceImage.of(
        encode_png(Image.merge("RGB", (stripes, ramp, across) if turned else (ramp, across, stripes)))
    )


def _graph_alone() -> AbstractContextManager[Any]:
    """Return a context in which gradients are recorded and nothing is kept for them, so that no memory is needed."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda kept: kept)


@torch.enable_grad()
def _scored(component: Any, actions: TokenBatch | DenoisingBatch) -> Tensor:
    with _graph_alone():
        scored: Tensor = component.logprobs(actions).logprobs
    if not scored.requires_grad:
        raise _RefusedError("its log-probs have no gradient")
    return scored.detach().cpu()


def _is_wide(component: Any) -> bool:
    """Return whether weights and arithmetic have 32 bits: in 16, rounding is as large as some faults."""
    dtype = next(component.trained.model.parameters()).dtype
    return dtype in (torch.float32, torch.float64) and component.autocast is None


# --- tokens


def _try_tokens(policy: "CausalLMPolicy", tries: int) -> float:
    """Sample prompts of different lengths together, the first twice with one seed, and score them."""
    prompts, sources = _questions(policy)
    seeds = [tries, *range(tries, tries + 2 * len(prompts) - 1)]
    sampled = policy.sample_tokens(prompts, 2, seeds, sources=sources)
    actions, mask = sampled.actions, sampled.actions.loss_mask
    if not (torch.equal(mask[0], mask[1]) and torch.equal(actions.token_ids[0], actions.token_ids[1])):
        raise _RefusedError("two samples with the same seed differ")
    scored, plain, allowed = _scored(policy, actions), _plain(policy, actions), _allowed(policy, sampled)
    largest = 0.0
    for when, found in (("while sampling", sampled.rollout_logprobs), ("while scoring", scored)):
        differences = (found - plain)[mask].abs()
        largest = max(largest, float(differences.max()))
        if differences.max() <= allowed.max_difference and differences.mean() <= allowed.mean_difference:
            continue
        if tries > 1:
            return _try_tokens(policy, tries - 1)
        amount = f"differ by {float(differences.max()):.2g}"
        raise _RefusedError(f"log-probs {when} {amount} from those of one forward pass over a row alone")
    if sources is not None:
        _refuse_blind(policy, actions, sources)
    return largest


def _try_shared(policy: "CausalLMPolicy") -> str:
    prompts, sources = _questions(policy)

    def sample(number: int) -> SampledTokens:
        first = 2 * len(prompts) * number
        return policy.sample_tokens(prompts, 2, range(first, first + 2 * len(prompts)), sources=sources)

    return try_shared_prompts(policy, sample, partial(_allowed, policy), wide=_is_wide(policy), tries=TRIES)


def _questions(policy: "CausalLMPolicy") -> tuple[Sequence[str], Sources | None]:
    """Return prompts, and their images where the model reads any: without one the last, where that is possible."""
    if policy.image_arguments is None:
        return _TEXTS[:2], None
    try:
        policy.encode(_TEXTS[-1:], for_engine=True)
    except InputError:
        # Some models read no prompt without an image.
        return _TEXTS[:2], tuple((picture(size),) for size in _SIZES)
    return _TEXTS, (*((picture(size),) for size in _SIZES), ())


def _allowed(policy: "CausalLMPolicy", sampled: SampledTokens) -> ParityTolerance:
    """Return the largest differences; none is too large for quantized weights, whose activations may have 8 bits."""
    if any(quantized_layers(policy.trained.model)):
        return ParityTolerance(math.inf, math.inf)
    if _is_wide(policy):
        return ParityTolerance(TOLERANCE["tokens"], TOLERANCE["tokens"])
    stored = sampled.rollout_logprobs[sampled.actions.loss_mask]
    return of_rounding(stored, blocks=policy.blocks, vocabulary=policy.vocabulary, temperature=1.0)


@torch.no_grad()
def _plain(policy: "CausalLMPolicy", actions: TokenBatch) -> Tensor:
    """Return log-probs of one forward pass over each row: no cache, padding, mask or explicit positions."""
    found = torch.zeros(actions.token_ids.shape)
    for row, (prompt, ids, mask) in enumerate(zip(actions.prompts, actions.token_ids, actions.loss_mask, strict=True)):
        images = actions.sources[row] if actions.sources is not None else ()
        logits = policy.plain_logits(prompt, images, ids[mask])
        written = ids[mask].to(logits.device)
        logprobs = gather_logprobs(vocabulary_logprobs(logits, policy.vocabulary, 1.0, policy.forbidden), written)
        found[row, mask] = logprobs.float().cpu()
    return found


@torch.no_grad()
def _refuse_blind(policy: "CausalLMPolicy", actions: TokenBatch, sources: Sources) -> None:
    """Compare the log-probs of all ids: one that was sampled because it is certain has the same with any image."""
    for row, (size, own) in enumerate(zip(_SIZES, sources, strict=False)):
        written = actions.token_ids[2 * row][actions.loss_mask[2 * row]]
        other = tuple(picture(size, turned=True) for _ in own)
        seen, changed = (
            vocabulary_logprobs(
                policy.plain_logits(actions.prompts[2 * row], images, written),
                policy.vocabulary,
                1.0,
                policy.forbidden,
            )
            for images in (own, other)
        )
        most = float((seen - changed)[seen.isfinite()].abs().max())
        if not most > BLIND:
            raise _RefusedError(f"another image changes log-probs by {most:.2g} nats only: it does not see its images")


# --- steps


def _try_steps(policy: "DiffusersPolicy") -> float:
    """Draw images of two prompts, of the first twice with one seed; with source images too where there can be any."""
    argument, size = policy.denoising.saved.pipeline_class.sources, policy.settings.size
    given: list[Sources] = [((), ())] if argument is None or not argument.required else []
    if argument is not None:
        larger = max(1, -(-argument.min_side // min(size)))
        one = picture(ImageSize(larger * size.width, larger * size.height))
        other = picture(ImageSize(larger * size.height, larger * size.width), turned=True)
        given.append(((other,), (one,) if argument.most == 1 else (one, other)))
    return max(_difference(policy, sources) for sources in given)


def _difference(policy: "DiffusersPolicy", sources: Sources) -> float:
    requests = [_request(_TEXTS[0], (0, 0), sources[0]), _request(_TEXTS[1], (1, 2), sources[1])]
    actions, recorded = _steps_of(list(policy.sample(requests)))
    allowed = TOLERANCE["steps"] if _is_wide(policy.denoising) else STEPS_IN_16_BITS
    # Latents: their log-probs are those of the noise, whatever the prompt, and few levels of a picture may differ.
    first, second = (states.double() for states in actions.states[:2])
    if not (first - second).abs().mean() <= allowed:
        raise _RefusedError("two samples with the same seeds differ")
    # One by one: rows that a call mixes have other log-probs alone.
    scored = torch.cat([_scored(policy.denoising, actions.select([row])) for row in range(len(actions))])
    difference = float((scored - recorded).abs().max())
    if not difference <= allowed:
        raise _RefusedError(f"log-probs while scoring differ by {difference:.2g} from those while sampling")
    if any(sources):
        _refuse_blind_steps(policy, actions.select([0]))
    return difference


def _request(prompt: str, seeds: tuple[int, int], sources: tuple[SourceImage, ...]) -> GroupRequest:
    names = tuple(f"trial of {prompt!r}, {index}" for index in range(2))
    return GroupRequest(
        prompt, names, seeds, seeds, tuple(seed + 10 for seed in seeds), window_start=0, sources=sources
    )


def _steps_of(groups: Sequence[RolloutGroup]) -> tuple[DenoisingBatch, Tensor]:
    steps = [group.streams["denoising"] for group in groups]
    actions = [each.actions for each in steps if isinstance(each.actions, DenoisingBatch)]
    return DenoisingBatch.join(actions), torch.cat([each.rollout_logprobs for each in steps])


def _refuse_blind_steps(policy: "DiffusersPolicy", row: DenoisingBatch) -> None:
    sources = row.sources
    assert sources is not None
    own = sources[0][0].open()
    others = [replace(row, sources=((picture(ImageSize(*own.size), turned),),)) for turned in (False, True)]
    if torch.equal(*(_scored(policy.denoising, each) for each in others)):
        raise _RefusedError("log-probs are the same with another source image, so it does not look at it")
