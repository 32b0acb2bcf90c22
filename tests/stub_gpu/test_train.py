"""Each tiny configuration trains on a GPU that computes nothing, from the command to the stored policy."""

from pathlib import Path

import pytest

from tests.stub_gpu.conftest import Program

CONFIGS = ("tiny", "tiny_text", "tiny_sd3", "tiny_grounding", "tiny_edit", "tiny_sd3_nft", "tiny_both")


@pytest.mark.slow
@pytest.mark.stub_gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_a_run_is_trained_and_stored(run_on_stub: Program, tmp_path: Path, config: str) -> None:
    run_on_stub("train", config, str(tmp_path))
    assert list(tmp_path.glob("*/policies/000001/*"))


@pytest.mark.slow
@pytest.mark.stub_gpu
@pytest.mark.parametrize(
    ("gib", "setting", "stage"),
    [
        ("0.03", "rollout.prompts_per_batch: got 4", "collect rollouts"),
        ("0.05", "update.micro_batch_size: got 64", "update policy"),
    ],
)
def test_a_stage_without_room_is_tried_in_halves_and_refused_by_name(
    run_on_stub: Program, tmp_path: Path, gib: str, setting: str, stage: str
) -> None:
    refused = (
        rf"(?s)InputError: {setting}\. The device's memory is too small for iteration 1: {stage} \(CUDA out of memory"
    )
    with pytest.raises(AssertionError, match=refused):
        run_on_stub("train", "tiny_text", str(tmp_path), "rollout.prompts_per_batch=8", STUB_GPU_GIB=gib)
