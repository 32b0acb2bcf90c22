"""Rows of rollouts and advantages."""

import io
from typing import Any

from PIL import Image

from tasks.storage.tables import schemas


def image(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 2), (shade, 0, 255 - shade)).save(buffer, "PNG")
    return buffer.getvalue()


def rollouts(rows: int, *, seed: int = 2**63 - 1) -> dict[str, list[object]]:
    known = {
        "sample_id": "i000001.p0000.s00",
        "prompt": "a cup, 一只猫",
        "token_ids": [1, 2, 3],
        "rollout_logprobs": [-0.5, -0.25, 0.0],
        "loss_mask": [True, True, False],
        "finished": True,
        "temperature": 1.0,
        "seed": seed,
    }
    columns: dict[str, list[object]] = {
        name: [known.get(name)] * rows for name in (*schemas.IMAGE_ROLLOUTS.names, "image")
    }
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
    known = {"sample_id": "i000001.p0000.s00", "advantage": -0.5, "dropped": False, "imputed": 0}
    columns: dict[str, list[Any]] = {name: [known.get(name)] * len(breakdowns) for name in schemas.ADVANTAGES.names}
    return {**columns, "reward_breakdown": breakdowns}
