"""The small runs that are killed: every kind of stage, three iterations, held-out prompts in between."""

import json
from collections.abc import Mapping
from pathlib import Path

from ..flows.conftest import SMALL, TINY, TINY_TEXT, Runs

_FOLDER = Path(__file__).resolve().parent
PICTURES = {
    **SMALL,
    "run.iterations": 3,
    "evaluate.prompts": str(_FOLDER / "heldout.jsonl"),
    "evaluate.targets": "data/targets",
    "evaluate.target_column": "target",
    "evaluate.every": 2,
    "evaluate.samples_per_prompt": 1,
    "watch.guardrails": [{"reward": "jpeg"}],
}
TEXT = {
    "run.iterations": 3,
    "rollout.prompts_per_iteration": 2,
    "rollout.group_size": 2,
    "rollout.max_completion_length": 6,
    "update.minibatch_size": 2,
    "update.micro_batch_size": 2,
    "evaluate.prompts": str(_FOLDER / "heldout_text.jsonl"),
    "evaluate.every": 2,
    "evaluate.samples_per_prompt": 1,
}


def _training(file: str, settings: Mapping[str, object], runs: Runs, run: str) -> list[str]:
    values = {**settings, "storage.root": str(runs.root), "run.name": run}
    overrides = [part for name, value in values.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    return ["train", file, *overrides, "--json"]


def pictures(runs: Runs, run: str) -> list[str]:
    """`grpo train` of a picture model."""
    return _training(str(TINY), PICTURES, runs, run)


def text(runs: Runs, run: str) -> list[str]:
    """`grpo train` of a text model."""
    return _training(str(TINY_TEXT), TEXT, runs, run)


def small_pictures(runs: Runs, run: str) -> list[str]:
    """`grpo train` as the tests of flows call it."""
    return _training(str(TINY), SMALL, runs, run)
