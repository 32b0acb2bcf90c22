"""Reward functions that know no value for red things, write an outcome to every stream, or leave a process running."""

import os
import subprocess
import sys

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
