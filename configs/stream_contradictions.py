"""Refuse settings that the streams which a run trains have no use for, or that contradict each other there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields

from configs.rollouts import GlmImageRolloutSection, ImageRolloutSection
from configs.schema import RunConfig
from configs.training import UpdateSection, VelocityUpdateSection
from grpo_core.errors import InputError
from grpo_core.losses.settings import LOSSES
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from grpo_core.policies.protocol import policy_family
from grpo_core.rollouts.streams import Stream
from grpo_core.update.velocity_settings import MAX_MATCHED_STALENESS

MAX_MEAN_RATIO_DISTANCE = 1e-2
"""Largest distance from 1 that a bound of a ratio of mean log-probs may have."""

Check = Callable[[RunConfig, str, UpdateSection], Iterator[InputError]]


def stream_contradictions(config: RunConfig) -> Iterator[InputError]:
    """Yield every refused combination of what is trained with how it is sampled and updated."""
    untrainable = list(_trained(config))
    yield from untrainable
    if untrainable:
        return
    yield from _noise(config)
    yield from _negative_prompt(config)
    yield from _images_per_sample(config)
    yield from _previews(config)
    yield from _evaluation(config)
    for stream, update in config.updates.items():
        place = config.update_path(stream)
        if isinstance(update, VelocityUpdateSection):
            yield from _check_velocity(config, place, update)
        else:
            yield from _UPDATE_CHECKS[stream](config, place, update)


def _trained(config: RunConfig) -> Iterator[InputError]:
    policy = config.policy
    known = policy_family(policy.kind).streams
    if len(set(policy.train)) < len(policy.train) or not set(policy.train) <= set(known):
        hint = f"A policy of kind {policy.kind} trains {' or '.join(known)}, each named once; or leave it out."
        yield InputError("policy.train", list(policy.train), hint)
    if not policy.freeze_vision and policy.kind != "vision_lm":
        yield InputError("policy.freeze_vision", False, "Only a policy of kind vision_lm encodes images; leave it out.")


def _noise(config: RunConfig) -> Iterator[InputError]:
    rollout = config.rollout
    if not isinstance(rollout, DenoisingSettings):
        return
    if "denoising" not in config.streams:
        yield from _unused_noise(rollout, "Only trained denoising has noisy steps; add denoising to policy.train, or")
        return
    if isinstance(config.updates["denoising"], VelocityUpdateSection):
        # Every one of these settings is refused there.
        return
    try:
        rollout.check_window()
    except InputError as error:
        yield error
    if rollout.sde_window != "sliding" and rollout.sde_window_every != 1:
        hint = f"Only a sliding window moves, and rollout.sde_window is {rollout.sde_window}; leave it out."
        yield InputError("rollout.sde_window_every", rollout.sde_window_every, hint)
    if rollout.branch and not rollout.shared_noise:
        hint = "Only samples that start from the same noise share steps; set rollout.shared_noise to true."
        yield InputError("rollout.branch", True, hint)
    if rollout.branch and rollout.latest_start == 0:
        hint = "The window begins at the first step, and no step before it is shared; move rollout.sde_window_range."
        yield InputError("rollout.branch", True, hint)


def _negative_prompt(config: RunConfig) -> Iterator[InputError]:
    rollout, heldout = config.rollout, config.evaluation_rollout
    if not isinstance(rollout, DiffusersSettings) or rollout.negative_prompt is None:
        return
    assert isinstance(heldout, DiffusersSettings), "of the same kind"
    if max(rollout.guidance_scale, heldout.guidance_scale) <= 1:
        hint = "Without guidance it is not read; set rollout.guidance_scale above 1, or leave it out."
        yield InputError("rollout.negative_prompt", rollout.negative_prompt, hint)


def _unused_noise(rollout: DenoisingSettings, why: str, without: Sequence[str] = ()) -> Iterator[InputError]:
    """Yield every setting of noisy steps that was changed although there are none."""
    for field in fields(DenoisingSettings):
        value = getattr(rollout, field.name)
        if field.name in ImageRolloutSection.noise_settings.difference(without) and value != field.default:
            yield InputError(f"rollout.{field.name}", value, f"{why} leave it out.")


def _images_per_sample(config: RunConfig) -> Iterator[InputError]:
    rollout = config.rollout
    if not isinstance(rollout, GlmImageRolloutSection):
        return
    if len(config.streams) == 1:
        for name in ("samples_with_images", "images_per_sample"):
            if (value := getattr(rollout, name)) != 1:
                hint = "With one stream trained, rollout.group_size says how many samples are compared; leave it out."
                yield InputError(f"rollout.{name}", value, hint)
        return
    if rollout.images_per_sample == 1:
        hint = "Denoising is trained by comparing images of one token sample; give at least 2, such as 5."
        yield InputError("rollout.images_per_sample", 1, hint)
    if rollout.samples_with_images > rollout.group_size:
        hint = f"A prompt has {rollout.group_size} token samples (rollout.group_size); give at most that, such as 1."
        yield InputError("rollout.samples_with_images", rollout.samples_with_images, hint)


def _previews(config: RunConfig) -> Iterator[InputError]:
    rollout, place = config.rollout, "rollout.previews"
    if not isinstance(rollout, ImageRolloutSection) or rollout.previews is None:
        return
    previews, keep, size = rollout.previews, rollout.keep, rollout.group_size
    if "tokens" in config.streams:
        hint = "Previews choose among first noises, and tokens do not depend on them; train denoising alone, or leave"
        yield InputError(place, previews.model_dump(), f"{hint} it out.")
        return
    assert isinstance(rollout, DenoisingSettings), "images are denoised"
    if previews.steps >= rollout.num_inference_steps:
        hint = f"Trained images have {rollout.num_inference_steps} steps (rollout.num_inference_steps); give fewer."
        yield InputError(f"{place}.steps", previews.steps, hint)
    if keep.best + keep.worst != size:
        hint = f"best and worst together are rollout.group_size, which is {size}; change one, or leave keep out."
        yield InputError(f"{place}.keep", keep.model_dump(), hint)
    if previews.per_prompt < keep.best + keep.worst:
        hint = f"{keep.best + keep.worst} of them are trained; give more, such as {4 * size}."
        yield InputError(f"{place}.per_prompt", previews.per_prompt, hint)
    if rollout.shared_noise:
        hint = "Previews of one first noise are the same image; set it to false."
        yield InputError("rollout.shared_noise", True, hint)


def _evaluation(config: RunConfig) -> Iterator[InputError]:
    if isinstance(config.rollout, ImageRolloutSection):
        return
    for name in ("num_inference_steps", "guidance_scale"):
        if (value := getattr(config.evaluate, name)) is not None:
            yield InputError(f"evaluate.{name}", value, "Texts are not denoised; leave it out.")


def _check_tokens(config: RunConfig, place: str, update: UpdateSection) -> Iterator[InputError]:
    if update.mask_truncated and isinstance(config.rollout, ImageRolloutSection):
        yield InputError(f"{place}.mask_truncated", True, "Images are never truncated; leave it out.")
    yield from (InputError(f"{place}.{name}", value, hint) for name, value, hint in update.unfit("tokens"))


def _check_denoising(config: RunConfig, place: str, update: UpdateSection) -> Iterator[InputError]:
    rollout = config.rollout
    if isinstance(rollout, DenoisingSettings) and rollout.sde_window_size == 0:
        hint = f"Without noisy steps there are no importance ratios; give at least 1, or set {place}.algorithm to nft."
        yield InputError("rollout.sde_window_size", 0, hint)
    yield from (InputError(f"{place}.{name}", value, hint) for name, value, hint in update.unfit("denoising"))
    if config.advantages.kl_coef > 0:
        hint = f"Denoising steps have no KL inside the reward; set {place}.kl_coef, whose KL is exact, and this to 0."
        yield InputError("advantages.kl_coef", config.advantages.kl_coef, hint)
    if isinstance(rollout, DenoisingSettings) and rollout.logprob_reduction == "mean":
        yield from _bounds_that_never_bind(place, update)


def _check_velocity(config: RunConfig, place: str, update: VelocityUpdateSection) -> Iterator[InputError]:
    rollout = config.rollout
    assert isinstance(rollout, ImageRolloutSection)
    if rollout.sde_window_size:
        hint = f"{update.algorithm} learns from finished images, sampled without noisy steps; set it to 0."
        yield InputError("rollout.sde_window_size", rollout.sde_window_size, hint)
    why = f"{update.algorithm} has no noisy steps;"
    yield from _unused_noise(rollout, why, without=["sde_window_size"])
    if rollout.shared_noise:
        hint = "Without noisy steps siblings differ by their first noise alone; set it to false."
        yield InputError("rollout.shared_noise", True, hint)
    if config.run.staleness > MAX_MATCHED_STALENESS:
        most = f"give at most {MAX_MATCHED_STALENESS}"
        hint = f"{update.algorithm} has no importance weights for images of older policies; {most}."
        yield InputError("run.staleness", config.run.staleness, hint)
    levels = update.timesteps_per_image
    if levels is not None and levels > rollout.num_inference_steps:
        hint = f"Images have {rollout.num_inference_steps} noise levels (num_inference_steps); give at most that."
        yield InputError(f"{place}.timesteps_per_image", levels, hint)
    if config.advantages.kl_coef > 0:
        hint = f"{update.algorithm} has no log-probs that a KL could be taken of; set {place}.kl_coef instead."
        yield InputError("advantages.kl_coef", config.advantages.kl_coef, hint)


def _bounds_that_never_bind(place: str, update: UpdateSection) -> Iterator[InputError]:
    """Yield every bound of a ratio that is farther from 1 than a ratio of mean log-probs ever is."""
    traits = LOSSES.get(update.loss)
    clips = traits is None or traits.clips
    weighted = update.mismatch.mode != "none"
    bounds = {
        "clip_range": (update.clip_range if clips else None, 0.0),
        "clip_range_high": (update.clip_range_high if clips else None, 0.0),
        "delta": (update.delta, 1.0),
        "loss_settings.ratio_cap": (update.own.get("ratio_cap"), 1.0),
        "mismatch.cap": (update.mismatch.cap if weighted else None, 1.0),
    }
    for name, (bound, center) in bounds.items():
        if bound is None or bound - center <= MAX_MEAN_RATIO_DISTANCE:
            continue
        hint = (
            "The log-prob of a step is the mean over its latents, so that the ratio is the D-th root of the ratio of "
            f"densities, within about 1e-4 of 1 for D latents; it would never reach this. Give {center + 1e-4:g}, or "
            "set rollout.logprob_reduction to sum."
        )
        yield InputError(f"{place}.{name}", bound, hint)


_UPDATE_CHECKS: Mapping[Stream, Check] = {"tokens": _check_tokens, "denoising": _check_denoising}
