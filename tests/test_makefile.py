"""The Makefile: what users start may download models, what the project starts for itself does not."""

import os
import subprocess

import pytest

from tests.tiny_policies import MODEL

REPOSITORY = MODEL.parents[2]


@pytest.mark.parametrize(("target", "offline"), [("train", False), ("test", True), ("test-slow", True)])
def test_only_a_run_of_the_user_may_download(target: str, offline: bool) -> None:
    command = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.installed", target, "CONFIG=mine.yaml"]
    # `make test` hands its own settings to what it starts.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"
    }
    made = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    (line,) = made.stdout.splitlines()
    assert ("HF_HUB_OFFLINE=1" in line) is offline
    assert ("grpo train mine.yaml" in line) is not offline
