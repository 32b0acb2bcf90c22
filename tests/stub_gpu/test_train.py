"""A tiny configuration trains on a GPU that computes nothing, from the command to the stored policy."""

from pathlib import Path

import pytest

from tests.stub_gpu.conftest import Program


@pytest.mark.slow
@pytest.mark.stub_gpu
def test_a_run_is_trained_and_stored(run_on_stub: Program, tmp_path: Path) -> None:
    run_on_stub("train", "tiny_text", str(tmp_path))
    assert list(tmp_path.glob("*/policies/000001/*"))
