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
