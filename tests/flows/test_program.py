"""The program itself: what it answers before anything heavy is imported."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.flows.conftest import REPOSITORY, Runs

Command = tuple[list[str], int, str]
"""Arguments, exit code, and a word of what is printed."""

PROGRAM = """
import contextlib, io, json, sys
from flows import train, evaluate, replay, rescore
from flows.command_line.main import main

answers = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, said = ["grpo", *arguments], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
    heavy = [name for name in ("torch", "prefect", "transformers", "polars") if name in sys.modules]
    answers.append([code or 0, said.getvalue(), heavy])
print(json.dumps(answers))
"""
REQUESTS = [
    ["evaluate", "absent"],
    ["replay", "absent"],
    ["prune", "absent", "--policies-last", "1"],
    ["rescore", "absent", "--rewards", "x", "--name", "y"],
    ["inspect", "absent"],
    ["ui", "--host", "::"],
]
COMMANDS: list[Command] = [
    *((arguments, 2, arguments[-1] if arguments[1] == "--host" else "absent") for arguments in REQUESTS),
    *(([arguments[0], "--help"], 0, "Usage") for arguments in REQUESTS),
    (["--version"], 0, "grpo 0."),
    (["trian"], 2, "train"),
    (["train", "configs/tiny.yaml", "--rnu", "a"], 2, "--run"),
    (["train", "configs/tyni.yaml"], 2, "configs/tiny.yaml"),
    (["train", "configs/tiny.yaml", "--set", "update.learing_rate=1"], 2, "update.learning_rate"),
    (["train", "configs/tiny.yaml", "--set", "data.prompts=data/prompts/shapes_trian.jsonl"], 2, "shapes_train.jsonl"),
    (["train", "configs/tiny_text.yaml", "--set", "policy.model=data/models/tiny-txt"], 2, "policy.model"),
    (["--show-completion", "bash"], 0, "COMPLETE"),
]


def answer(commands: Sequence[Command], folder: Path) -> None:
    """Give these commands to one program in a folder: each answers with its exit code, and without heavy imports."""
    for name in ("configs", "data"):
        (folder / name).symlink_to(REPOSITORY / name)
    command = [sys.executable, "-c", PROGRAM, json.dumps([arguments for arguments, _, _ in commands])]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    answers = json.loads(ended.stdout)
    for (arguments, code, said), (answered, output, heavy) in zip(commands, answers, strict=True):
        assert (answered, heavy) == (code, []), (arguments, output)
        assert said in output, (arguments, output)


def test_answers_at_once(tmp_path: Path) -> None:
    answer(COMMANDS, tmp_path)


def test_a_typo_is_refused_at_once_where_the_run_is_finished(finished: Runs, tmp_path: Path) -> None:
    train = ["train", "runs/run/config.yaml", "--set", "storage.root=runs", "--set"]
    typos = [
        ([*train, "update.lerning_rate=1"], "update.learning_rate"),
        ([*train, "data.prompts=data/prompts/shapes_trian.jsonl"], "shapes_train.jsonl"),
        ([*train, "policy.model=data/models/tiny"], "policy.model"),
        (["inspect", "rnu"], "The nearest of the 1 in runs: run"),
        (["evaluate", "run", "--set", "rollout.temprature=1"], "rollout.temperature"),
        (["evaluate", "run", "--set", "update.learning_rate=1"], "--set"),
        (["replay", "run", "--set", "data.prompts=other.txt"], "--set"),
        (["rescore", "run", "--rewards", "configs/rewards/mx.yaml", "--name", "y"], "configs/rewards/mix.yaml"),
    ]
    answer([(arguments, 2, said) for arguments, said in typos], tmp_path)
