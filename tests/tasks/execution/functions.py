"""Reward functions that write to every stream, leave a process running, know no value, or do what a completion says."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

SAID = '{"outcome": ["x", {}]}\n'


def prints_everywhere(completions: list[object], prompts: list[str], **columns: object) -> list[float]:
    print(SAID, end="", flush=True)
    sys.__stdout__.write(SAID)
    os.write(1, SAID.encode())
    subprocess.run(["echo", SAID], check=True)
    return [float(len(prompt)) for prompt in prompts]


def starts_a_server(completions: list[object], prompts: list[str], **columns: object) -> list[float]:
    with subprocess.Popen(["sleep", "600"]) as server:
        return [float(server.wait()) for _ in prompts]


def fails_for_reds(completions: list[object], prompts: list[str], **columns: object) -> list[float]:
    return [float("nan") if "red" in prompt else 1.0 for prompt in prompts]


def odd(completions: list[str], **_: object) -> list[float | None]:
    """Score, or do what a completion says: `wait PATH` writes this process's id, and goes on when PATH exists."""
    for text in completions:
        if text == "exit":
            os._exit(3)
        if text.startswith("wait "):
            path = Path(text.removeprefix("wait "))
            path.with_suffix(".begun").write_text(str(os.getpid()))
            while not path.exists():
                time.sleep(0.02)
    return [{"nan": math.nan, "null": None}.get(text, 0.1 + 0.2) for text in completions]
