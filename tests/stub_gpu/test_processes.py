"""Process groups on a GPU that computes nothing: what they exchange is what NCCL takes, and numbers stay the same."""

import json
from pathlib import Path

import pytest

from tests.stub_gpu.conftest import Program


@pytest.mark.slow
@pytest.mark.stub_gpu
@pytest.mark.parametrize("family", ["causal_lm", "vision_lm", "glm_image_both"])
def test_what_processes_exchange_is_contiguous_on_the_gpu(run_on_stub: Program, tmp_path: Path, family: str) -> None:
    run_on_stub("processes", str(tmp_path / "found.json"), family)
    found = json.loads((tmp_path / "found.json").read_text())
    for kind in ("DistributedProcessGroup", "ShardedProcessGroup"):
        assert found[kind] == pytest.approx(found["alone"], rel=1e-5, abs=1e-5)
    for name in ("c10d::broadcast_", "c10d::allreduce_", "_c10d_functional::all_gather_into_tensor"):
        assert found["called"][name]
