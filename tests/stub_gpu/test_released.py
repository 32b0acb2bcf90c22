"""What doctor estimates, beside what PyTorch's allocator takes for models of released sizes."""

import json
from pathlib import Path

import pytest

from tests.stub_gpu.conftest import Program

CASES = (
    "glm_image_80gb",
    "glm_image_both",
    "sd35_medium",
    "flux1_dev",
    "qwen_image",
    "text_7b",
    "text_1_7b",
    "text_1_7b_nucleus",
    "medground",
)


@pytest.mark.slow
@pytest.mark.stub_gpu
@pytest.mark.parametrize("case", CASES)
def test_the_allocator_takes_what_doctor_estimates(run_on_stub: Program, tmp_path: Path, case: str) -> None:
    file = tmp_path / "found.json"
    # Some need more than a card has.
    run_on_stub("released", case, str(tmp_path / "models"), str(file), STUB_GPU_GIB="160")
    found = json.loads(file.read_text())
    assert found["estimated"].keys() == found["allocated"].keys()
    assert found["estimated"] == pytest.approx(found["allocated"], rel=0.1)
