"""A reward that cannot do without tokens is refused where none are sampled."""

from pathlib import Path

import pytest

from configs.loader import check_config
from flows.preflight.inputs import token_problems
from grpo_core.rewards.registry import build_reward


@pytest.mark.parametrize(
    ("kind", "parameter", "refused"),
    [
        ("diffusers", "completion_ids", ["mine"]),
        ("diffusers", "completion_ids=None", []),
        ("glm_image", "completion_ids", []),
    ],
)
def test_a_function_that_needs_ids(tmp_path: Path, kind: str, parameter: str, refused: list[str]) -> None:
    (tmp_path / "mine.py").write_text(f"def score(completions, {parameter}, **columns): return []\n")
    settings = {"function": f"{tmp_path / 'mine.py'}:score", "factory": False}
    values = {
        "run": {"name": "x", "iterations": 1},
        "policy": {"kind": kind, "model": "m"},
        "data": {"prompts": "prompts.txt"},
        "rollout": {"height": 64, "width": 64, "num_inference_steps": 10, "guidance_scale": 1.0},
        "rewards": [{"reward": "function", "name": "mine", "settings": settings}],
    }
    config = check_config(values)
    (section,) = config.rewards
    reward = build_reward(section.reward, section.settings)
    found = list(token_problems(config, section, reward, section.label))
    assert [error.place for error in found] == refused
    assert all("parameter a default" in error.hint for error in found)
