"""A few rows that are computed again, so that the parity gate stays independent where passes are left out.

Where prompts are computed once, a pass reads the keys and values of its prompts, as sampling does, and a fault of both
would not show: some rows are computed whole, and the gate compares them under the same tolerance. Where stored
log-probs stand for recomputed ones, some rows are recomputed nevertheless, and have to be equal to the bit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grpo_core.parity import ParityTolerance, measure_parity, require_parity
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.rollouts.ragged import RaggedRows
from grpo_core.update.process_group import ProcessGroup

_MOST, _ROWS_OF_ONE = 4, 64
"""One row in this many, which is about a hundredth of an update's work."""


@torch.no_grad()
def witness_logprobs(component: PolicyComponent, rows: RaggedRows, micro_batch_size: int) -> dict[int, Tensor]:
    """Compute log-probs of rows whose prompt others share, by row; empty where no prompt is shared.

    Each is of another prompt, so that none is shared in this pass.
    """
    if not component.trained.shares_prompts:
        return {}
    counts, first = Counter(rows.actions.prompts), dict[str, int]()
    for row, prompt in enumerate(rows.actions.prompts):
        if counts[prompt] > 1:
            first.setdefault(prompt, row)
    chosen = list(first.values())[: min(micro_batch_size, _MOST, -(-len(rows) // _ROWS_OF_ONE))]
    if not chosen:
        return {}
    scored = component.logprobs(rows.actions.select(chosen).trimmed(), entropy="none").logprobs
    return dict(zip(chosen, scored.cpu(), strict=True))


def require_witnesses_agree(rows: RaggedRows, witnesses: Mapping[int, Tensor], tolerance: ParityTolerance) -> None:
    """Raise ParityError if old_logprobs are not those of the rows that were computed whole."""
    assert rows.old_logprobs is not None, "they are computed before the first step"
    chosen, whole = list(witnesses), torch.stack([*witnesses.values()])
    old, mask = (each.select(chosen)[:, : whole.shape[1]] for each in (rows.old_logprobs, rows.loss_mask))
    names, limit = [rows.sample_ids[row] for row in chosen], tolerance.max_difference
    report = measure_parity(names, whole, old, mask, rows.actions.stream, limit=limit)
    require_parity(replace(report, of_shared_prompts=True), tolerance)


@torch.no_grad()
def stored_logprobs_stand(
    component: PolicyComponent,
    rows: RaggedRows,
    first: Sequence[int],
    recomputed: Tensor,
    others: Sequence[int],
    process_group: ProcessGroup,
) -> bool:
    """Return whether stored log-probs are the recomputed ones, to the bit, in all of `first` and a few of the others.

    Args:
        first: rows whose log-probs have been recomputed, one row's after another's in `recomputed`.
        others: rows of which at most four, as far from each other as they are many, are recomputed here in one pass.
    """
    stored, mask = (each.take(first).values for each in (rows.rollout_logprobs, rows.loss_mask))
    if not torch.equal(stored[mask], recomputed[mask]):
        return False
    part = rows.select(others[:: -(-len(others) // _MOST)])
    actions = part.actions.trimmed()
    found, mask = component.logprobs(actions, entropy="none").logprobs.cpu(), actions.loss_mask
    # Processes on unlike hardware must not part ways.
    return bool(process_group.from_first(torch.equal(part.rollout_logprobs[:, : found.shape[1]][mask], found[mask])))
