"""Log-probs under the policy before the update and under the reference, computed before the first optimizer step."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.policies.protocol import Policy
from grpo_core.records import TokenBatch, TrainingRows
from grpo_core.update.batches import microbatches
from grpo_core.update.process_group import ProcessGroup, share
from grpo_core.update.settings import UpdateSettings

Tick = Callable[[], None]


@torch.no_grad()
def with_recomputed(
    policy: Policy, rows: TrainingRows, settings: UpdateSettings, process_group: ProcessGroup, tick: Tick
) -> TrainingRows:
    """Return the rows with old_logprobs, and with old_entropy and ref_logprobs where the settings need them."""
    entropy = settings.entropy_quantile < 1

    def under_policy(tokens: TokenBatch) -> Float[Tensor, "quantities batch time"]:
        scored = policy.logprobs(tokens, entropy=entropy)
        return torch.stack([scored.logprobs, scored.entropy] if entropy else [scored.logprobs])

    def under_reference(tokens: TokenBatch) -> Float[Tensor, "quantities batch time"]:
        return policy.reference_logprobs(tokens).unsqueeze(0)

    old = _for_all_rows(under_policy, rows, settings, process_group, tick, quantities=1 + entropy)
    rows = replace(rows, old_logprobs=old[0], old_entropy=old[1] if entropy else None)
    if not settings.with_reference:
        return rows
    reference = _for_all_rows(under_reference, rows, settings, process_group, tick, quantities=1)
    return replace(rows, ref_logprobs=reference[0])


def passes(rows: TrainingRows, settings: UpdateSettings, process_group: ProcessGroup) -> int:
    """Return how often `with_recomputed` ticks."""
    parts = -(-len(rows) // settings.micro_batch_size)
    return -(-parts // process_group.count) * (1 + settings.with_reference)


def _for_all_rows(
    score: Callable[[TokenBatch], Float[Tensor, "quantities batch time"]],
    rows: TrainingRows,
    settings: UpdateSettings,
    process_group: ProcessGroup,
    tick: Tick,
    *,
    quantities: int,
) -> Float[Tensor, "quantities rows time"]:
    """Score each process's share of the rows; every process gets all scores, on the CPU."""
    scores = torch.zeros(quantities, *rows.tokens.token_ids.shape)
    lengths = rows.tokens.loss_mask.sum(-1).tolist()
    for part, counts in share(microbatches(lengths, settings.micro_batch_size), process_group):
        tokens = rows.tokens.select(part).trimmed()
        scored = score(tokens).cpu()
        if counts:
            scores[:, part, : scored.shape[-1]] = scored
        tick()
    return process_group.add(scores)
