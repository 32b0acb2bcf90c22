"""The stream of tokens in stored rollouts: its columns, its rows for training, and its metrics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from jaxtyping import Int
from torch import Tensor

from grpo_core.groups import RolloutGroup
from grpo_core.image_size import ImageSize
from grpo_core.records import SampledActions, SampledTokens, TokenBatch, TokenSupport
from tasks.metrics.names import COMPLETION_LENGTH, DRAFTS, TOKENS
from tasks.runs.layout import PARTS
from tasks.storage.tables.lists import lists_of, padded, unpadded


def token_columns(group: RolloutGroup) -> dict[str, Sequence[Any]]:
    """Return the columns of a group's tokens, one row per sample."""
    sampled = _sampled_tokens(group)
    tokens, compared = sampled.actions, group.compared.get("tokens")
    scored, reference = (None, None) if compared is None else (compared.scored, compared.reference)
    return {
        "token_ids": unpadded(tokens.token_ids, tokens.loss_mask),
        "rollout_logprobs": unpadded(sampled.rollout_logprobs, tokens.loss_mask),
        **{
            name: [None] * len(tokens) if values is None else unpadded(values, tokens.loss_mask)
            for name, values in (("scored_logprobs", scored), ("ref_logprobs", reference))
        },
        "loss_mask": unpadded(tokens.loss_mask, tokens.loss_mask),
        **_support_columns(tokens),
        "length": tokens.loss_mask.sum(-1).tolist(),
        "prompt_length": sampled.prompt_lengths.tolist(),
        "max_length": [sampled.max_length] * len(tokens),
        "finished": sampled.finished.tolist(),
    }


def _sampled_tokens(group: RolloutGroup) -> SampledTokens:
    sampled = group.streams["tokens"]
    assert isinstance(sampled, SampledTokens), "a stream has its own kind of actions"
    return sampled


def _support_columns(tokens: TokenBatch) -> dict[str, Sequence[Any]]:
    if tokens.support is None:
        return {"support_ids": [None] * len(tokens), "support_counts": [None] * len(tokens)}
    return {
        "support_ids": lists_of(tokens.support.ids, tokens.support.counts.sum(-1)),
        "support_counts": unpadded(tokens.support.counts, tokens.loss_mask),
    }


def read_tokens(table: pl.DataFrame, folders: Sequence[Path], scratch: Path, max_length: int) -> SampledActions:
    """Return the stored tokens of a table's rows.

    The tokens of all rows are in memory at once, about 13 bytes each. The ids that a truncated sampler could choose, up
    to thousands for each token, stay on disk, and microbatches read their own.

    Args:
        table: rows of rollouts, in the order in which they are stored.
        folders: local folders of the rollouts.
        scratch: folder for local files that the tokens are read from.
        max_length: of SampledActions.

    Raises:
        ValueError: rows of several temperatures, or with and without a stored support.
    """
    files = [path for folder in folders for path in sorted(folder.glob(PARTS))]
    return SampledActions(
        actions=read_token_batch(table, _support(table, _mapped_support_ids(files, table["sample_id"], scratch))),
        rollout_logprobs=padded(table["rollout_logprobs"]),
        finished=table["finished"].to_torch(),
        max_length=max_length,
    )


def read_token_batch(table: pl.DataFrame, support: TokenSupport | None = None) -> TokenBatch:
    """Return the stored token ids of a table's rows, padded on the right.

    Args:
        table: with the columns prompt, token_ids, loss_mask and temperature, of images also width and height.
        support: the ids that could be sampled; not needed to make images of the tokens.

    Raises:
        ValueError: rows of several temperatures.
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
        support=support,
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


def _mapped_support_ids(files: Sequence[Path], kept: pl.Series, folder: Path) -> Int[Tensor, " entries"]:
    """Write the support ids of the kept rows to one file, in their order, and map it into memory."""
    path = folder / "support_ids"
    with path.open("wb") as output:
        for file in files:
            for batch in pq.ParquetFile(file).iter_batches(batch_size=16, columns=["sample_id", "support_ids"]):
                rows = batch.filter(pc.is_in(batch["sample_id"], kept.to_arrow()))
                output.write(rows["support_ids"].flatten().to_numpy(zero_copy_only=False).tobytes())
    entries = path.stat().st_size // torch.int32.itemsize
    return torch.from_file(str(path), size=entries, dtype=torch.int32) if entries else torch.zeros(0, dtype=torch.int32)


def token_metrics(files: Sequence[Path]) -> dict[str, float]:
    """Return the number of tokens, with those of the prompts, and the lengths of the drafts, of stored rollouts.

    The tokens of a draft count once, however often it is rendered. Empty for rollouts without tokens.
    """
    samples = pl.scan_parquet(list(files))
    names = samples.collect_schema().names()
    if "token_ids" not in names:
        return {}
    drafts = samples.filter(pl.col("image_number") == 0) if "image_number" in names else samples
    found = drafts.select("length", "prompt_length", "finished").collect()
    lengths: list[int] = found["length"].to_list()
    return {
        TOKENS: float(int(found["prompt_length"].sum()) + sum(lengths)),
        COMPLETION_LENGTH: sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": int((~found["finished"]).sum()) / len(lengths),
        # Only where they are fewer than the samples.
        **({} if len(lengths) == samples.select(pl.len()).collect().item() else {DRAFTS: float(len(lengths))}),
    }
