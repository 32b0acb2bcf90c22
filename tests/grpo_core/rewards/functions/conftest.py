"""Functions that a user writes, and samples that they score."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from grpo_core.rewards.scoring_batch import ScoringBatch

TEXTS = [
    "<think>\nI add.\n</think>\nThe sum is \\boxed{3}.",
    "The sum is 3, the sum is 3, the sum is 3.",
    "<think>once</think><think>twice</think> \\boxed{4}",
    "",
]
TOKENS = [list(range(12)), [5, 6, 7] * 9, [1, 1, 1, 1], []]
COLUMNS = {"solution": ["$3$", "$3$", "no number", "$3$"]}


def texts(count: int = 4, columns: Mapping[str, list[object]] | None = None, **more: Any) -> ScoringBatch:
    return ScoringBatch(
        sample_ids=[f"s{i}" for i in range(count)],
        prompts=[f"prompt {i}" for i in range(count)],
        completions=TEXTS[:count],
        columns={key: list(values)[:count] for key, values in (columns or {}).items()},
        token_ids=TOKENS[:count],
        **more,
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(source: str, name: str = "mine.py") -> str:
        path = tmp_path / name
        path.write_text(source)
        return str(path)

    return write


SPY = """
calls = []
def score(prompts, completions, completion_ids, **kwargs):
    calls.append((prompts, completions, completion_ids, kwargs))
    return [float(len(c)) for c in completions]
"""


def spied(path: str) -> list[Any]:
    (module,) = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == path]
    calls: list[Any] = module.calls
    return calls
