"""Whether a pipeline can be sampled and scored, tried on a small copy of it before any weights are read."""

import hashlib
import math
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_core.actions import DenoisingBatch, Sources
from grpo_core.errors import InputError, first_line
from grpo_core.policies.denoising.rows import DenoisedGroup, only_errors
from grpo_core.policies.diffusers.component import DiffusersDenoising
from grpo_core.policies.diffusers.saved_pipeline import (
    DiffusersSettings,
    SavedPipeline,
    call_settings,
    passes_per_step,
    read_saved_pipeline,
)
from grpo_core.policies.diffusers.small_copy import small_copy
from grpo_core.policies.diffusers.trial_sources import alike_sources, reduced_sources, trial_sources
from grpo_core.policies.pipeline_files import INDEX_FILE, find_model_file
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.records import GroupRequest
from grpo_core.streams import ImageSize

TOLERANCE = 1e-4
"""In nats. Rounding is below a millionth in fp32 where both sides see the same rows."""

_PROMPTS = ("a cat", "two dogs on a red sofa in front of a window, and a bird above them that looks at the smaller one")
_LONGEST = 256
_STEPS = 2
_PIXELS = 32
"""A trial's images have this height, or the next that the pipeline makes, and twice the width: a swap shows."""

_CONFIGS = (
    "model_index.json",
    "config.json",
    "scheduler_config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
)
_TRIED: dict[tuple[str, object], tuple[bool, str | None]] = {}


def refuse_incompatible(model: str, settings: DiffusersSettings) -> bool:
    """Try a small copy of a pipeline; no weights are read.

    Args:
        model: a folder, or a hub name whose files are searched in the local cache only.
        settings: how it will be guided, and how long prompts may be.

    Returns:
        False if no small copy can be built, so that only the pipeline itself can answer.

    Raises:
        InputError: the pipeline cannot be sampled and scored here.
    """
    index, saved = find_model_file(model, INDEX_FILE), read_saved_pipeline(model)
    if index is None or saved is None:
        return False
    # What of the settings changes the passes of a step.
    passes = (passes_per_step(saved, settings), _trial_length(saved, settings), settings.negative_prompt)
    key = (_digest(index.parent, saved), passes)
    if key not in _TRIED:
        _TRIED[key] = try_copy(index.parent, saved, settings)
    tried, reason = _TRIED[key]
    _refuse(model, saved, reason)
    return tried


def refuse_incompatible_model(model: str, denoising: DiffusersDenoising) -> None:
    """Raise InputError if this pipeline, with its weights, cannot be sampled and scored here.

    It makes images of the size of its settings, one by one and without gradients, which take more memory.
    """
    own = denoising.settings
    with torch.no_grad():
        _refuse(model, denoising.saved, why_incompatible(denoising, size=own.size, rows_per_call=1))


def _refuse(model: str, saved: SavedPipeline, reason: str | None) -> None:
    if reason is not None:
        hint = f"A {saved.class_name} cannot be trained here: {reason}. docs/denoising.md lists those that can."
        raise InputError("policy.model", model, hint)


def lacks_small_copy(model: str) -> bool:
    """Return whether a trial in this process found that no small copy of a pipeline can be built."""
    index, saved = find_model_file(model, INDEX_FILE), read_saved_pipeline(model)
    if index is None or saved is None:
        return False
    digest = _digest(index.parent, saved)
    return any(configs == digest and not tried for (configs, _), (tried, _) in _TRIED.items())


def _digest(folder: Path, saved: SavedPipeline) -> str:
    """Return a digest of the configuration files."""
    digest = hashlib.sha256()
    files = (file for name in _CONFIGS for file in (folder / name, *(folder / part / name for part in saved.parts)))
    for file in files:
        if file.is_file():
            digest.update(str(file.relative_to(folder)).encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def try_copy(folder: Path, saved: SavedPipeline, settings: DiffusersSettings) -> tuple[bool, str | None]:
    """Return whether a small copy could be built, and why it cannot be sampled and scored, if so."""
    chosen = _trial_settings(saved, settings)
    try:
        with (
            only_errors(),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            reduced_sources(saved.class_name),
        ):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            copy = small_copy(folder, saved, partial(_run, saved, chosen))
            if copy is None:
                return False, None
            trained = train_model(copy.transformer, TrainingChoice(None), base_name=saved.class_name)
            return True, why_incompatible(DiffusersDenoising(copy, saved, chosen, trained))
    except AttributeError as error:
        return True, f"its call fails ({first_line(error)})"


def _trial_length(saved: SavedPipeline, settings: DiffusersSettings) -> int | None:
    """Return a length of prompts that costs little; None for a pipeline that takes none."""
    length = settings.max_sequence_length or saved.pipeline_class.call.get("max_sequence_length")
    return min(length, _LONGEST) if isinstance(length, int) else None


def _trial_settings(saved: SavedPipeline, settings: DiffusersSettings) -> DiffusersSettings:
    height = math.lcm(_PIXELS, saved.pixel_unit or 1)
    side = (saved.positions_per_side or 2 * height) * (saved.pixel_unit or 1)
    return replace(
        settings,
        height=min(height, side),
        width=min(2 * height, side),
        max_sequence_length=_trial_length(saved, settings),
        num_inference_steps=_STEPS,
        sde_type="flow_grpo",
        noise_level=0.7,
        sde_window="first",
        sde_window_size=1,
        sde_window_range=(0, 1),
        logprob_reduction="mean",
    )


def _run(saved: SavedPipeline, settings: DiffusersSettings, pipeline: Any) -> None:
    """Call the pipeline as diffusers does, with one prompt and its own scheduler."""
    fixed, sources = saved.pipeline_class.fixed_arguments(settings.size), saved.pipeline_class.sources
    if sources is not None and sources.required:
        fixed["image"] = sources.argument(alike_sources(settings.size, sources)[:1], settings.size)
    pipeline.set_progress_bar_config(disable=True)
    pipeline(
        prompt=_PROMPTS[0],
        height=settings.height,
        width=settings.width,
        num_inference_steps=_STEPS,
        output_type="np",
        **fixed,
        **call_settings(saved, settings),
    )


def why_incompatible(
    denoising: DiffusersDenoising, *, size: ImageSize | None = None, rows_per_call: int = len(_PROMPTS)
) -> str | None:
    """Return why a pipeline cannot be sampled and scored here; None if it can.

    Images of two prompts of different lengths are drawn twice with the same seeds, and scored; where a pipeline takes
    source images also with such of two sizes, which it has to look at. Log-probs are compared in fp32 and above: in 16
    bits rounding is as large as some faults.

    Args:
        denoising: the component; its settings are the same afterwards.
        size: of the images; None: as small as the pipeline makes them.
        rows_per_call: number of images that are drawn and scored at once.
    """
    own = denoising.settings
    chosen = _trial_settings(denoising.saved, own)
    denoising.settings = chosen if size is None else replace(chosen, height=size.height, width=size.width)
    try:
        sources = trial_sources(denoising.settings.size, denoising.saved.pipeline_class.sources)
        tried = (_differences(denoising, rows_per_call, each) for each in sources)
        return next((reason for reason in tried if reason is not None), None)
    except Exception as error:
        # The pipeline's own code may raise anything on arguments that it does not expect.
        return f"sampling and scoring images of two prompts fails ({first_line(error)})"
    finally:
        denoising.settings = own


def _differences(denoising: DiffusersDenoising, rows_per_call: int, sources: Sources | None) -> str | None:
    first, again = (_actions(_sampled(denoising, rows_per_call, sources)) for _ in range(2))
    if not all(torch.equal(one, other) for one, other in zip(first[0].states, again[0].states, strict=True)):
        return "two calls with the same seeds give different images"
    denoising.prepare_for_update()
    starts = range(0, len(first[0]), rows_per_call)
    parts = [first[0].select(range(start, start + rows_per_call)) for start in starts]
    scored = torch.cat([denoising.logprobs(part).logprobs for part in parts])
    if sources is not None and not _looks_at_sources(denoising, first[0].select(range(rows_per_call))):
        return "log-probs are the same with another source image, so it does not look at it"
    if torch.is_grad_enabled() and not scored.requires_grad:
        return "its log-probs have no gradient"
    largest = float((scored.detach().cpu() - first[1]).abs().max())
    wide = next(denoising.trained.model.parameters()).dtype in (torch.float32, torch.float64)
    if wide and denoising.autocast is None and not largest <= TOLERANCE:
        return f"log-probs while scoring differ by {largest:.2g} from those while sampling"
    return None


@torch.no_grad()
def _looks_at_sources(denoising: DiffusersDenoising, actions: DenoisingBatch) -> bool:
    argument = denoising.saved.pipeline_class.sources
    assert argument is not None
    pairs = [((each,),) * len(actions) for each in alike_sources(denoising.settings.size, argument)]
    one, other = (denoising.logprobs(replace(actions, sources=own)).logprobs for own in pairs)
    return not torch.equal(one, other)


def _sampled(denoising: DiffusersDenoising, rows_per_call: int, sources: Sources | None) -> list[DenoisedGroup]:
    """Draw images of both prompts: one each, or two each with source images, which are given for both."""
    size: ImageSize = denoising.settings.size
    each = range(1 if sources is None else 2)
    requests = [
        GroupRequest(
            prompt=prompt,
            sample_ids=tuple(f"trial.{row}.{sample}" for sample in each),
            seeds=tuple(row + 10 * sample for sample in each),
            noise_seeds=tuple(row + 10 * sample for sample in each),
            step_seeds=tuple(row + len(_PROMPTS) + 10 * sample for sample in each),
            size=size,
            window_start=0,
            sources=() if sources is None else sources[row],
        )
        for row, prompt in enumerate(_PROMPTS)
    ]
    return denoising.sample(requests, None, size=size, rows_per_call=rows_per_call)


def _actions(groups: list[DenoisedGroup]) -> tuple[DenoisingBatch, torch.Tensor]:
    """Return the noisy steps of all groups, and their log-probs."""
    sampled = [group.sampled for group in groups if group.sampled is not None]
    actions = [each.actions for each in sampled if isinstance(each.actions, DenoisingBatch)]
    return DenoisingBatch.join(actions), torch.cat([each.rollout_logprobs for each in sampled])
