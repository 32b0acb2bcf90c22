"""The columns of every table. A change of a column is a new schema version; a test pins them."""

import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from grpo_core.rollouts.streams import STREAMS, Modality, Stream

SCHEMA_VERSION = 10  # the one version of stored tables that this program writes and reads

_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

BREAKDOWN = pa.list_(
    pa.struct(
        [
            ("reward", pa.string()),
            ("value", pa.float64()),
            ("scaled", pa.float64()),  # clamped and scaled to its range, or what replaces a null
        ]
    )
)


def _described(fields: list[tuple[str, pa.DataType]]) -> pa.Schema:
    """Make a schema with which `datasets` shows the images."""
    schema = pa.schema(fields)
    info = {"info": {"features": {field.name: _feature(field.type) for field in schema}}}
    return schema.with_metadata({"huggingface": json.dumps(info), "grpo.schema_version": str(SCHEMA_VERSION)})


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if kind == _IMAGE:
        return {"_type": "Image"}
    if pa.types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    names = {pa.float32(): "float32", pa.float64(): "float64", pa.bool_(): "bool"}
    return {"dtype": names.get(kind, str(kind)), "_type": "Value"}


_ID = [
    ("sample_id", pa.string()),
    ("iteration", pa.int32()),  # that collected the sample, in the run that did; of an evaluation: the policy's version
]
_SAMPLE = [
    *_ID,
    ("group_id", pa.string()),
    ("prompt_id", pa.string()),
    ("dataset", pa.string()),
    ("sibling", pa.int32()),
    ("prompt", pa.string()),
    ("columns", pa.string()),  # JSON of the prompt file's other columns
    ("sources", pa.list_(pa.string())),  # sha256 of the images in the prompt, in their order
]
_TOKENS = [
    ("token_ids", pa.list_(pa.int32())),
    ("rollout_logprobs", pa.list_(pa.float32())),
    ("scored_logprobs", pa.list_(pa.float32())),  # in one pass, as the next; null: no reward needed the reference's
    ("ref_logprobs", pa.list_(pa.float32())),
    ("loss_mask", pa.list_(pa.bool_())),
    ("support_ids", pa.list_(pa.int32())),  # of all tokens one after another; null: every id could be sampled
    ("support_counts", pa.list_(pa.int32())),  # how many of them belong to each token
    ("length", pa.int32()),
    ("prompt_length", pa.int32()),  # ids that the model reads before the first token
    ("max_length", pa.int32()),  # by the sampler's settings; of images, of their own size and not the row's
    ("finished", pa.bool_()),  # False: cut at max_length
    ("temperature", pa.float64()),
    ("top_p", pa.float64()),
    ("top_k", pa.int32()),
    ("min_p", pa.float64()),
]
_ORIGIN = [
    ("seed", pa.int64()),
    ("policy_version", pa.int32()),
    ("policy_digest", pa.string()),
]

_DENOISING = [
    ("denoising_logprobs", pa.list_(pa.float32())),  # one per noisy step
    ("window_start", pa.int32()),  # index of the first noisy step
    ("step_seed", pa.int64()),  # of the noise of the noisy steps
    ("sde_type", pa.string()),
    ("noise_level", pa.float64()),
    ("sde_window", pa.string()),
    ("sde_window_size", pa.int32()),
    ("sde_window_range", pa.list_(pa.int32())),
    ("sde_window_every", pa.int32()),
    ("logprob_reduction", pa.string()),
]
_OF_STREAM: Mapping[Stream, list[tuple[str, pa.DataType]]] = MappingProxyType(
    {"tokens": _TOKENS, "denoising": _DENOISING}
)
_TARGET = [
    ("target_uri", pa.string()),
    ("target_sha256", pa.string()),
]
_RENDERING = [
    ("token_sample", pa.int32()),  # which token sequence of its group it is made from
    ("image_number", pa.int32()),  # which image of that token sequence it is
    ("height", pa.int32()),
    ("width", pa.int32()),
    ("num_inference_steps", pa.int32()),
    ("guidance_scale", pa.float64()),
    ("noise_seed", pa.int64()),
]
_WITHOUT_TOKENS = [
    ("max_sequence_length", pa.int32()),  # of prompts in ids; null: the pipeline's own
    ("negative_prompt", pa.string()),
]
_SOLVER = ("solver", pa.string())  # of the steps without noise; no column: euler
_PREVIEW = [  # no columns: no previews have chosen the seeds
    ("preview_reward", pa.float64()),  # of few steps, never compared with a reward; null: it could not be scored
    ("preview_rank", pa.float64()),  # among those of the prompt, 1 the best, equal ones with their mean rank
    ("preview_count", pa.int32()),  # previews of the prompt
    ("preview_steps", pa.int32()),
]
_DEFECT = ("defect", pa.string())  # why the image is unusable, such as NaN pixels; null: it is usable
_TEXTS = [
    ("max_completion_length", pa.int32()),
    ("stop", pa.string()),  # JSON list
    ("system_prompt", pa.string()),
    ("chat_template", pa.bool_()),  # null: as the tokenizer has it
    ("min_pixels", pa.int64()),  # of images in prompts; null: as the image processor has it
    ("max_pixels", pa.int64()),
    ("engine", pa.string()),  # who sampled: policy or vllm
    ("engine_version", pa.string()),  # of its package; null: of the policy itself
    ("engine_dtype", pa.string()),  # that it computed in
    ("engine_settings", pa.string()),  # JSON of what else decides its results; null: nothing
    ("engine_adapter", pa.string()),  # digest of the adapter that a server answered with; null: none
]

_COMPLETION = [
    ("completion", pa.string()),
    ("completion_start", pa.string()),  # what the chat template wrote of it, such as <think>; no column: nothing
]


def rollout_schema(
    modality: Modality,
    streams: Collection[Stream],
    *,
    with_start: bool = False,
    with_previews: bool = False,
    with_solver: bool = False,
) -> pa.Schema:
    """Return the schema of rollouts with the recorded streams, if any; a chat template may begin completions."""
    of_streams = [field for stream in STREAMS if stream in streams for field in _OF_STREAM[stream]]
    if modality == "text":
        return _described([*_SAMPLE, *of_streams, *_TEXTS, *_ORIGIN, *_COMPLETION[: 1 + with_start]])
    prompted = [] if "tokens" in streams else _WITHOUT_TOKENS
    drawn = [*_RENDERING, *[_SOLVER] * with_solver, *prompted, *(_PREVIEW if with_previews else [])]
    return _described([*_SAMPLE, *_TARGET, *of_streams, *drawn, *_ORIGIN, _DEFECT])


IMAGE_ROLLOUTS = rollout_schema("image", ["tokens"])
TEXT_ROLLOUTS = rollout_schema("text", ["tokens"])

IMAGES = _described([("sample_id", pa.string()), ("prompt", pa.string()), ("image", _IMAGE)])

BASELINES = _described(
    [
        *(field for field in _SAMPLE if field[0] != "sibling"),
        *_TARGET,
        ("token_ids", pa.list_(pa.int32())),  # empty: nothing was sampled
        _DEFECT,
    ]
)

REWARDS = _described(
    [
        *_ID,
        ("reward", pa.string()),  # its name in the mix
        ("value", pa.float64()),  # null: the reward does not apply to the sample, or could not score it
        ("raw", pa.float64()),
        ("failure", pa.string()),  # why it could not score it
        ("seconds", pa.float64()),  # of the batch, shared equally by its samples
        # JSON: reward, version, settings, their digest, and the weights' sha256; null: the sample is out of scope
        ("provenance", pa.string()),
    ]
)

ADVANTAGES = _described(
    [
        *_ID,
        ("group_id", pa.string()),
        ("prompt_id", pa.string()),
        ("dataset", pa.string()),
        # Whose actions the advantage is for. Of tokens there is a row per token sample, that of its first image.
        ("stream", pa.string()),
        ("reward", pa.float64()),  # of tokens: the mean over the token sample's images
        ("kl_penalty", pa.float64()),  # what the KL to the reference took from the reward; null: none was taken
        ("advantage", pa.float64()),  # null: the sample has no reward, or its group was dropped
        ("group_mean", pa.float64()),
        ("group_std", pa.float64()),
        ("dropped", pa.bool_()),  # its group has no spread and was left out
        ("imputed", pa.int32()),  # rewards of the sample that were filled with the group's mean
        ("reward_breakdown", BREAKDOWN),
    ]
)

METRICS = _described([("iteration", pa.int32()), ("metric", pa.string()), ("value", pa.float64())])

UPDATE_STEPS = _described(
    [
        ("optimizer_step", pa.int64()),
        ("loss", pa.float64()),
        ("policy_loss", pa.float64()),  # without the KL term and the entropy bonus
        ("grad_norm", pa.float64()),
        ("learning_rate", pa.float64()),
        ("kl", pa.float64()),
        ("entropy", pa.float64()),
        ("clip_low", pa.float64()),
        ("clip_high", pa.float64()),
        ("clip_low_min", pa.float64()),  # over rows
        ("clip_high_max", pa.float64()),
        ("ratio_mean", pa.float64()),
        ("log_ratio_clamped", pa.float64()),  # tokens
        ("mismatch_weight", pa.float64()),
        ("trained_tokens", pa.float64()),
    ]
)

NFT_STEPS = _described(
    [
        ("optimizer_step", pa.int64()),
        ("loss", pa.float64()),
        ("policy_loss", pa.float64()),  # without the KL term
        ("grad_norm", pa.float64()),
        ("learning_rate", pa.float64()),
        ("kl", pa.float64()),  # mean square of velocities
        ("positive_error", pa.float64()),
        ("negative_error", pa.float64()),
        ("velocity_change", pa.float64()),  # mean square
    ]
)

VELOCITY_STEPS = _described(
    [
        ("optimizer_step", pa.int64()),
        ("loss", pa.float64()),
        ("policy_loss", pa.float64()),  # without the KL term
        ("grad_norm", pa.float64()),
        ("learning_rate", pa.float64()),
        ("kl", pa.float64()),  # mean square of velocities
        ("velocity_error", pa.float64()),  # mean square
        ("clipped", pa.float64()),  # share of the ratios
    ]
)
