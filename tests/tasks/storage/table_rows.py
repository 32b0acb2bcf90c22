"""Rows of rollouts and advantages."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tasks.storage.tables import schemas
from tasks.storage.tables.parquet import write_table


def image(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 2), (shade, 0, 255 - shade)).save(buffer, "PNG")
    return buffer.getvalue()


def rollouts(rows: int, *, seed: int = 2**63 - 1) -> dict[str, list[object]]:
    one = {
        "sample_id": "i000001.p0000.s00",
        "group_id": "i000001.p0000",
        "prompt_id": "0123456789abcdef",
        "dataset": "default",
        "prompt": "a cup, 一只猫",
        "columns": '{"tag": "x"}',
        "token_ids": [1, 2, 3],
        "rollout_logprobs": [-0.5, -0.25, 0.0],
        "loss_mask": [True, True, False],
        "length": 2,
        "max_length": 3,
        "finished": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "height": 2,
        "width": 4,
        "num_inference_steps": 1,
        "guidance_scale": 1.0,
        "seed": seed,
        "noise_seed": 7,
        "policy_version": 0,
        "policy_digest": "d" * 64,
    }
    columns: dict[str, list[object]] = {name: [one.get(name)] * rows for name in schemas.IMAGE_ROLLOUTS.names}
    columns["sibling"] = list(range(rows))
    columns["image"] = [{"bytes": image(shade), "path": f"{shade}.png"} for shade in range(rows)]
    return columns


Entry = dict[str, str | float | None]


def entry(reward: str, value: float | None, scaled: float | None) -> Entry:
    return {"reward": reward, "value": value, "scaled": scaled}


BREAKDOWNS: list[list[Entry]] = [
    [entry("ssim", 0.25, 0.25), entry("ein Maß", 2.0, 1.0)],
    [entry("ssim", None, 0.75), entry("ein Maß", None, None)],
    [],
]


def advantages(breakdowns: list[list[Entry]]) -> dict[str, list[Any]]:
    one = {
        "sample_id": "i000001.p0000.s00",
        "group_id": "i000001.p0000",
        "prompt_id": "0123456789abcdef",
        "dataset": "default",
        "reward": 0.5,
        "kl_penalty": None,
        "advantage": -0.5,
        "group_mean": 0.75,
        "group_std": 0.25,
        "dropped": False,
        "imputed": 0,
    }
    columns: dict[str, list[Any]] = {name: [value] * len(breakdowns) for name, value in one.items()}
    return {**columns, "reward_breakdown": breakdowns}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "iteration_000001" / "rollouts"
    write_table(folder / "part-00000.parquet", schemas.IMAGE_ROLLOUTS, rollouts(3))
    (folder.parent / "rollouts.manifest.json").write_text("{}")
    return folder
