"""Groups of rollouts -> the columns that are stored, and stored columns -> the rows that a policy is trained on."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor

from grpo_core.collect import RolloutGroup
from grpo_core.image_size import ImageSize
from grpo_core.records import BrokenImage, TokenBatch, TokenSupport
from tasks.rollouts.plan import GroupPlan
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.tables.schemas import IMAGE_ROLLOUTS, TEXT_ROLLOUTS

SCHEMAS: Mapping[str, pa.Schema] = MappingProxyType({"image": IMAGE_ROLLOUTS, "text": TEXT_ROLLOUTS})
"""Schema by modality of the policy."""


def rollout_columns(
    group: RolloutGroup, planned: GroupPlan, iteration: int, policy: PolicyRef, settings: Any
) -> dict[str, Sequence[Any]]:
    """Return one group's rows by column; the writer keeps the columns that its schema has.

    Args:
        settings: the policy's frozen sampling settings; its fields are columns. Width and height of images are those
            of the group.
    """
    request, tokens = group.request, group.tokens
    rows = len(request.sample_ids)
    same = {
        "iteration": iteration,
        "group_id": planned.group_id,
        "prompt_id": planned.prompt_id,
        "dataset": planned.dataset,
        "prompt": planned.prompt,
        "columns": json.dumps(planned.columns, ensure_ascii=False, sort_keys=True),
        "target_uri": planned.target_uri,
        "target_sha256": planned.target_sha256,
        "policy_version": policy.version,
        "policy_digest": policy.digest,
        "max_length": group.max_length,
        "prompt_length": group.prompt_length,
        **{name: _plain(value) for name, value in asdict(settings).items()},
        **({} if request.size is None else request.size._asdict()),
    }
    return {
        **{name: [value] * rows for name, value in same.items()},
        "sample_id": request.sample_ids,
        "sibling": range(rows),
        "token_ids": _rows(tokens.token_ids, tokens.loss_mask),
        "rollout_logprobs": _rows(group.rollout_logprobs, tokens.loss_mask),
        "scored_logprobs": _rows_or_nulls(group.scored_logprobs, tokens.loss_mask),
        "ref_logprobs": _rows_or_nulls(group.ref_logprobs, tokens.loss_mask),
        "loss_mask": _rows(tokens.loss_mask, tokens.loss_mask),
        **_support_columns(tokens),
        "length": tokens.loss_mask.sum(-1).tolist(),
        "finished": group.finished.tolist(),
        "seed": request.seeds,
        "noise_seed": request.noise_seeds,
        **_output_columns(group),
    }


def _plain(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, tuple) else value


def _rows(values: Tensor, mask: Tensor) -> pa.ListArray:
    """Return the rows without the padding at their end."""
    places = torch.arange(1, mask.shape[1] + 1)
    lengths = (mask * places).amax(-1)
    return _lists(values[places <= lengths.unsqueeze(-1)], lengths)


def _lists(values: Tensor, lengths: Tensor) -> pa.ListArray:
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return pa.ListArray.from_arrays(pa.array(offsets.int().numpy()), pa.array(values.numpy()))


def _rows_or_nulls(values: Tensor | None, mask: Tensor) -> pa.ListArray | list[None]:
    return [None] * len(mask) if values is None else _rows(values, mask)


def _support_columns(tokens: TokenBatch) -> dict[str, Sequence[Any]]:
    if tokens.support is None:
        return {"support_ids": [None] * len(tokens), "support_counts": [None] * len(tokens)}
    return {
        "support_ids": _lists(tokens.support.ids, tokens.support.counts.sum(-1)),
        "support_counts": _rows(tokens.support.counts, tokens.loss_mask),
    }


def _output_columns(group: RolloutGroup) -> dict[str, Sequence[Any]]:
    names = group.request.sample_ids
    texts = [output for output in group.outputs if isinstance(output, str)]
    if texts:
        return {"completion": texts}
    broken = [output if isinstance(output, BrokenImage) else None for output in group.outputs]
    images = [output.image if isinstance(output, BrokenImage) else output for output in group.outputs]
    encoded = [
        {"bytes": encode_png(image), "path": f"{name}.png"}
        for image, name in zip(images, names, strict=True)
        if isinstance(image, Image.Image)
    ]
    return {"image": encoded, "defect": [each and each.reason for each in broken]}


def encode_png(image: Image.Image) -> bytes:
    """Return the image as a PNG file."""
    buffer = io.BytesIO()
    # At 1024 x 1024 the default level takes five times as long for a file that is a sixth smaller.
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def token_batch(table: pl.DataFrame, support_ids: Tensor) -> TokenBatch:
    """Return the stored tokens of a table's rows, padded on the right.

    Args:
        table: with the columns prompt, token_ids, loss_mask, support_counts and temperature, of images also width and
            height; one temperature, and truncated sampling for all rows or none.
        support_ids: of all rows, one after another.

    Raises:
        ValueError: rows of several temperatures, or with and without a stored support.
    """
    temperatures = table["temperature"].unique().to_list()
    if len(temperatures) > 1:
        raise ValueError(
            f"the rows were sampled at several temperatures, {sorted(temperatures)}; update on each separately"
        )
    return TokenBatch(
        prompts=tuple(table["prompt"]),
        token_ids=padded(table["token_ids"]).long(),
        loss_mask=padded(table["loss_mask"]),
        temperature=temperatures[0] if temperatures else 1.0,
        support=_support(table, support_ids),
        sizes=tuple(map(ImageSize, table["width"], table["height"])) if "width" in table.columns else None,
    )


def _support(table: pl.DataFrame, ids: Tensor) -> TokenSupport | None:
    missing = table["support_counts"].null_count()
    if missing == table.height:
        return None
    if missing:
        raise ValueError(
            "some rows were sampled with top_k, top_p or min_p and some without; update on each separately"
        )
    return TokenSupport(ids, padded(table["support_counts"]).long())


def padded(lists: pl.Series) -> Tensor:
    """Return a column of lists of unequal length as one tensor [rows, longest], with zeros on the right."""
    values, lengths = _flat(lists), lists.list.len().cast(pl.Int64).to_torch()
    filled = torch.arange(int(lengths.max()) if len(lengths) else 0) < lengths.unsqueeze(-1)
    rows = torch.zeros(filled.shape, dtype=values.dtype)
    rows[filled] = values
    return rows


def _flat(lists: pl.Series) -> Tensor:
    """Return the values of all lists, one after another: one copy of the Arrow buffer, no Python objects."""
    return torch.from_numpy(np.array(lists.to_arrow().flatten().to_numpy(zero_copy_only=False)))
