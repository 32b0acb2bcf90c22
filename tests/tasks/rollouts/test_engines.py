"""Every stored text says who sampled it, and the gate of an update names the engine of its rows."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import transformers

from configs.training import ParitySection
from grpo_core.parity import ParityError
from tasks.execution.resources import run_resources
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.update.update_jobs import TEXTS, UPDATE, advantages_of, alone, job_of


def test_rows_and_the_gate_name_the_engine(store: ArtifactStore, tmp_path: Path) -> None:
    batched = replace(TEXTS, rollout=TEXTS.rollout.model_copy(update={"engine": "continuous_batching"}))
    found = {}
    with run_resources():
        for modality in (TEXTS, batched):
            rollouts = modality.collect()
            files = sorted(store.local_files(rollouts).glob("*.parquet"))
            rows = pl.read_parquet(files).select("engine", "engine_version", "engine_dtype", "engine_adapter")
            found |= dict.fromkeys(rows.unique().rows(), rollouts)
        version = transformers.__version__
        assert list(found) == [
            ("policy", None, "float32", None),
            ("continuous_batching", version, "float32", None),
        ]
        update = UPDATE.model_copy(update={"parity": ParitySection(mean_difference=1e-12)})
        by_engine = job_of(batched, rollouts, advantages_of(rollouts), update=update)
        with pytest.raises(ParityError) as refused:
            alone(by_engine, tmp_path / "refused")
        assert refused.value.report.sampled_by == f"continuous_batching {version} in float32"
        assert refused.value.tolerance.share_beyond == 1e-3
        assert alone(job_of(batched, rollouts, advantages_of(rollouts)), tmp_path / "made").rows == 7
