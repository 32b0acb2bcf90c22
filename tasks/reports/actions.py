"""What was recorded of a sample's actions, in words: a line per stream."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

RECORDED = ("rollout_logprobs", "loss_mask", "finished", "denoising_logprobs", "window_start", "draft", "rendering")
"""Columns of rollouts that are read for it, as far as a table has them."""


class ActionSummary(NamedTuple):
    """The log-probs of one stream of a sample: what they are of, their values, and their meaning in full."""

    title: str
    value: str
    meaning: str


def summarize_actions(row: Mapping[str, Any]) -> list[ActionSummary]:
    """Summarize what was recorded of a stored sample; nothing for a stream that was not."""
    return [*_tokens(row), *_denoising(row)]


def _tokens(row: Mapping[str, Any]) -> list[ActionSummary]:
    if row.get("rollout_logprobs") is None:
        return []
    trained = [value for value, kept in zip(row["rollout_logprobs"], row["loss_mask"], strict=True) if kept]
    cut = "" if row["finished"] else ", truncated"
    value = f"{math.fsum(trained):.1f} over {len(trained)} tokens{cut}"
    return [ActionSummary("log-prob", value, "sum over the tokens, in nats, recorded while sampling")]


def _denoising(row: Mapping[str, Any]) -> list[ActionSummary]:
    # Images that were sampled without noisy steps have an empty list.
    if not row.get("denoising_logprobs"):
        return []
    first, values = row["window_start"] + 1, row["denoising_logprobs"]
    steps = f"step {first}" if len(values) == 1 else f"steps {first} to {first + len(values) - 1}"
    meaning = "log-prob of each noisy denoising step, recorded while sampling; the first step is 1"
    return [ActionSummary(f"log-prob, {steps}", ", ".join(f"{value:.4f}" for value in values), meaning)]
