"""The program itself: what it answers before anything heavy is imported."""

import json
import subprocess
import sys

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
COMMANDS = [
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


def test_answers_at_once() -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps([arguments for arguments, _, _ in COMMANDS])]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = json.loads(ended.stdout)
    for (arguments, code, said), (answered, output, heavy) in zip(COMMANDS, answers, strict=True):
        assert (answered, heavy) == (code, []), (arguments, output)
        assert said in output, (arguments, output)
