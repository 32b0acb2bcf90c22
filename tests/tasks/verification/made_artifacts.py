"""Small artifacts of every kind, written as the stages write them, cut into as many files as a test wants."""

import io
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from tasks.runs.layout import ADVANTAGES_FILE, IMAGES_FILE, PART_FILE, SCORES_FILE, STATE_FILE, STATES_FILE
from tasks.storage import schemas
from tasks.storage.parquet import TableWriter, write_table

IDS = ("i000001.p0000.s00", "i000001.p0000.s01", "i000001.p0001.s00")
ROLLOUTS = schemas.rollout_schema("image", ["tokens", "denoising"], with_previews=True)

Columns = dict[str, list[Any]]


def png(shade: int = 100, pixel: int | None = None, *, level: int = 1) -> bytes:
    """An image of 4 x 2 pixels; `pixel` is the green level in the second row, third column."""
    pixels = np.full((2, 4, 3), shade, np.uint8)
    if pixel is not None:
        pixels[1, 2, 1] = pixel
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=level)
    return buffer.getvalue()


def value_of(kind: pa.DataType, row: int) -> Any:
    """A value of this type, another one in each row, neither null nor empty."""
    if pa.types.is_list(kind):
        return [value_of(kind.value_type, row + entry) for entry in range(3 + row)]
    if pa.types.is_struct(kind):
        return {field.name: value_of(field.type, row) for field in kind}
    if pa.types.is_string(kind):
        return f"text {row}"
    return {pa.bool_(): row % 2 == 0, pa.binary(): png(100 + row)}.get(kind, 1 + row)


def columns_of(schema: pa.Schema) -> Columns:
    """A table of this schema with a row for each sample."""
    return {
        **{field.name: [value_of(field.type, row) for row in range(len(IDS))] for field in schema},
        "sample_id": list(IDS),
    }


def rollouts() -> Columns:
    return {**columns_of(ROLLOUTS), "image": [{"bytes": png(100 + row), "path": f"{row}.png"} for row in range(3)]}


def states() -> dict[str, Tensor]:
    return {name: torch.linspace(-1.0, 1.0, 12).reshape(2, 6) + row for row, name in enumerate(IDS)}


def write_rollouts(
    folder: Path, columns: Columns, kept: Mapping[str, Tensor], *, cuts: Sequence[int] = (), row_groups: bool = False
) -> Path:
    """Write rows, images and states; a new file begins before each of these rows."""
    (folder / "states").mkdir(parents=True, exist_ok=True)
    count = len(columns["sample_id"])
    edges = [0, *cuts, count]
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
        part = {name: values[begin:end] for name, values in columns.items()}
        for name, schema in ((PART_FILE, ROLLOUTS), (IMAGES_FILE, schemas.IMAGES)):
            write_cut(folder / name.format(number), schema, part, row_groups=row_groups)
        own = {name: kept[name] for name in part["sample_id"] if name in kept}
        save_file(own, folder / STATES_FILE.format(0, number))
    return folder


def write_cut(path: Path, schema: pa.Schema, columns: Columns, *, row_groups: bool) -> None:
    """Write a table as one row group, or in one for each row and without compression."""
    if not row_groups:
        writer = TableWriter(path, schema)
        writer.write(columns)
        writer.close()
        return
    table = pa.table({field.name: pa.array(columns[field.name], field.type) for field in schema})
    pa.parquet.write_table(table, path, row_group_size=1, compression="none")


def write_scores(folder: Path, columns: Columns) -> Path:
    write_table(folder / SCORES_FILE, schemas.REWARDS, columns)
    return folder


def advantages() -> Columns:
    return {**columns_of(schemas.ADVANTAGES), "stream": ["tokens"] * len(IDS)}


def write_advantages(folder: Path, columns: Columns) -> Path:
    write_table(folder / ADVANTAGES_FILE, schemas.ADVANTAGES, columns)
    return folder


WEIGHTS = {"a.lora_A.weight": torch.tensor([1.0, 2.0]), "a.lora_B.weight": torch.tensor([3.0, 4.0])}
MOMENTS = {
    "a.lora_B.weight|exp_avg": torch.tensor([0.6, 0.8]),
    "a.lora_B.weight|exp_avg_sq": torch.tensor([0.0, 1e-6]),
    "a.lora_B.weight|step": torch.tensor(4.0),
}
STATE = {
    "policy_version": 1,
    "policy_digest": "d" * 64,
    "optimizer_steps": {"tokens": 4},
    "randomness": "derived",
}
ADAPTER = {"peft_type": "LORA", "r": 2, "target_modules": ["a", "b"], "peft_version": "0.17.0"}


def write_policy(
    folder: Path,
    weights: Mapping[str, Tensor] = WEIGHTS,
    moments: Mapping[str, Tensor] = MOMENTS,
    *,
    copies: Mapping[str, Mapping[str, Tensor]] | None = None,
    state: Mapping[str, object] = STATE,
    adapter: Mapping[str, object] = ADAPTER,
    steps: Columns | None = None,
) -> Path:
    own = folder / "tokens"
    own.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), own / "adapter_model.safetensors")
    save_file(dict(moments), own / "optimizer.safetensors")
    for name, copy in (copies or {}).items():
        (own / name).mkdir()
        save_file(dict(copy), own / name / "adapter_model.safetensors")
    (own / "adapter_config.json").write_text(json.dumps(adapter))
    (folder / STATE_FILE).write_text(json.dumps(state))
    measured = {name: [1.0, 0.5] for name in schemas.UPDATE_STEPS.names}
    table = {**measured, "optimizer_step": [3, 4], "learning_rate": [0.01, 0.01], **(steps or {})}
    write_table(own / "update_steps.parquet", schemas.UPDATE_STEPS, table)
    return folder
