"""The columns of every table. A change of a column is a new schema version; a test pins them."""

import json
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = 1

_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def _described(fields: list[tuple[str, pa.DataType]]) -> pa.Schema:
    """A schema that `datasets` reads with its pictures shown."""
    schema = pa.schema(fields)
    info = {"info": {"features": {field.name: _feature(field.type) for field in schema}}}
    return schema.with_metadata({"huggingface": json.dumps(info), "grpo.schema_version": str(SCHEMA_VERSION)})


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if kind == _IMAGE:
        return {"_type": "Image"}
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    names = {pa.float32(): "float32", pa.float64(): "float64", pa.bool_(): "bool"}
    return {"dtype": names.get(kind, str(kind)), "_type": "Value"}


ROLLOUTS = _described(
    [
        ("sample_id", pa.string()),
        ("group_id", pa.string()),
        ("prompt_id", pa.string()),
        ("sibling", pa.int32()),
        ("prompt", pa.string()),
        ("columns", pa.string()),  # JSON of the prompt file's other columns
        ("target_uri", pa.string()),
        ("target_sha256", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("length", pa.int32()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("num_inference_steps", pa.int32()),
        ("guidance_scale", pa.float64()),
        ("seed", pa.int64()),
        ("noise_seed", pa.int64()),
        ("policy_version", pa.int32()),
        ("policy_digest", pa.string()),
        ("image", _IMAGE),
    ]
)

REWARDS = _described(
    [
        ("sample_id", pa.string()),
        ("value", pa.float64()),  # null: the reward does not apply to the sample
        ("raw", pa.float64()),
        ("seconds", pa.float64()),  # of the batch, shared equally by its samples
        ("provenance", pa.string()),  # JSON: reward, version, and the settings that determine the score
    ]
)

ADVANTAGES = _described(
    [
        ("sample_id", pa.string()),
        ("group_id", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("group_mean", pa.float64()),
        ("group_std", pa.float64()),
        ("imputed", pa.int32()),  # rewards of the sample that were filled with the group's mean
    ]
)

METRICS = _described([("iteration", pa.int32()), ("metric", pa.string()), ("value", pa.float64())])

UPDATE_STEPS = _described(
    [
        ("optimizer_step", pa.int64()),
        ("loss", pa.float64()),
        ("grad_norm", pa.float64()),
        ("learning_rate", pa.float64()),
        ("kl", pa.float64()),
        ("entropy", pa.float64()),
        ("clip_low", pa.float64()),
        ("clip_high", pa.float64()),
        ("ratio_mean", pa.float64()),
    ]
)
