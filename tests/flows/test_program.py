"""The program itself: what it answers before anything heavy is imported."""

import subprocess
import sys

import pytest

from tests.flows.conftest import REPOSITORY

PROGRAM = """
import sys
from flows.command_line.main import main
try:
    main()
finally:
    assert not {"torch", "prefect", "transformers"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--version"], 0, "grpo 0."),
        (["trian"], 2, "train"),
        (["train", "configs/tiny.yaml", "--rnu", "a"], 2, "--run"),
        (["train", "configs/tyni.yaml"], 2, "configs/tiny.yaml"),
        (["train", "configs/tiny.yaml", "--set", "update.learing_rate=1"], 2, "update.learning_rate"),
        (["train", "configs/tiny_text.yaml", "--set", "policy.model=data/models/tiny-txt"], 2, "policy.model"),
        (["--show-completion", "bash"], 0, "COMPLETE"),
    ],
)
def test_answers_at_once(arguments: list[str], code: int, said: str) -> None:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stdout + ended.stderr
