"""The columns of every table, pinned."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.storage.tables import schemas

SAMPLE = [
    ("sample_id", "string"),
    ("group_id", "string"),
    ("prompt_id", "string"),
    ("dataset", "string"),
    ("sibling", "int32"),
    ("prompt", "string"),
    ("columns", "string"),
]
TOKENS = [
    ("token_ids", "list<element: int32>"),
    ("rollout_logprobs", "list<element: float>"),
    ("scored_logprobs", "list<element: float>"),
    ("ref_logprobs", "list<element: float>"),
    ("loss_mask", "list<element: bool>"),
    ("support_ids", "list<element: int32>"),
    ("support_counts", "list<element: int32>"),
    ("length", "int32"),
    ("max_length", "int32"),
    ("finished", "bool"),
    ("temperature", "double"),
    ("top_p", "double"),
    ("top_k", "int32"),
    ("min_p", "double"),
]
ORIGIN = [("seed", "int64"), ("policy_version", "int32"), ("policy_digest", "string")]
PINNED = {
    "IMAGE_ROLLOUTS": [
        *SAMPLE,
        ("target_uri", "string"),
        ("target_sha256", "string"),
        *TOKENS,
        ("height", "int32"),
        ("width", "int32"),
        ("num_inference_steps", "int32"),
        ("guidance_scale", "double"),
        ("noise_seed", "int64"),
        *ORIGIN,
        ("defect", "string"),
        ("image", "struct<bytes: binary, path: string>"),
    ],
    "TEXT_ROLLOUTS": [
        *SAMPLE,
        *TOKENS,
        ("max_completion_length", "int32"),
        ("stop", "string"),
        ("system_prompt", "string"),
        ("chat_template", "bool"),
        *ORIGIN,
        ("completion", "string"),
    ],
    "REWARDS": [
        ("sample_id", "string"),
        ("value", "double"),
        ("raw", "double"),
        ("failure", "string"),
        ("seconds", "double"),
        ("provenance", "string"),
    ],
    "ADVANTAGES": [
        ("sample_id", "string"),
        ("group_id", "string"),
        ("prompt_id", "string"),
        ("dataset", "string"),
        ("reward", "double"),
        ("kl_penalty", "double"),
        ("advantage", "double"),
        ("group_mean", "double"),
        ("group_std", "double"),
        ("dropped", "bool"),
        ("imputed", "int32"),
        ("reward_breakdown", "list<element: struct<reward: string, value: double, scaled: double>>"),
    ],
    "METRICS": [("iteration", "int32"), ("metric", "string"), ("value", "double")],
    "UPDATE_STEPS": [
        ("optimizer_step", "int64"),
        ("loss", "double"),
        ("policy_loss", "double"),
        ("grad_norm", "double"),
        ("learning_rate", "double"),
        ("kl", "double"),
        ("entropy", "double"),
        ("clip_low", "double"),
        ("clip_high", "double"),
        ("clip_low_min", "double"),
        ("clip_high_max", "double"),
        ("ratio_mean", "double"),
        ("log_ratio_clamped", "double"),
        ("mismatch_weight", "double"),
        ("trained_tokens", "double"),
    ],
}


@pytest.mark.parametrize("name", PINNED)
def test_columns_are_those_of_schema_version_4(name: str, tmp_path: Path) -> None:
    assert schemas.SCHEMA_VERSION == 4
    schema: pa.Schema = getattr(schemas, name)
    pq.write_table(schema.empty_table(), tmp_path / "table.parquet")
    written = pq.read_schema(tmp_path / "table.parquet")
    assert [(field.name, str(field.type)) for field in written] == PINNED[name]
    assert written.metadata[b"grpo.schema_version"] == b"4"


def test_every_table_is_pinned() -> None:
    assert {name for name, value in vars(schemas).items() if isinstance(value, pa.Schema)} == set(PINNED)
