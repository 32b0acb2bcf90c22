"""What a worker does side by side."""

from typing import Any

import pytest

from flows.workers.worker import needs_the_machine


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"root": "runs", "run": "tiny", "call": "0" * 64}, True),
        ({"config": {"run": {"name": "tiny"}}}, True),
        (
            {"config": {"placement": {"rollouts": {"pool": None, "timeout": 60.0}}, "rewards": [{"reward": "ssim"}]}},
            True,
        ),
        ({"config": {"placement": {"update": {"pool": "gpu"}}}}, False),
        ({"config": {"rewards": [{"reward": "ssim"}, {"reward": "psnr", "pool": "cpu"}]}}, False),
        ({"request": {"run": "tiny"}}, False),
    ],
)
def test_what_has_a_machine_to_itself(parameters: dict[str, Any], expected: bool) -> None:
    assert needs_the_machine(parameters) is expected
