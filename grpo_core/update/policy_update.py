"""Train a policy on stored rows; the parity gate comes before the first optimizer step."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grpo_core.losses import mismatch_metrics, mismatch_weights
from grpo_core.optimizer import PolicyOptimizer
from grpo_core.parity import ParityTolerance, measure_parity, require_parity
from grpo_core.policies.protocol import Policy
from grpo_core.records import TokenBatch, TrainingRows
from grpo_core.update.metrics import UpdateResult
from grpo_core.update.process_group import SINGLE_PROCESS, ProcessGroup, share
from grpo_core.update.settings import UpdateSettings, microbatches, minibatches
from grpo_core.update.step import make_minibatch, optimizer_step, trained_tokens

Progress = Callable[[int, int], None]


def update_policy(
    policy: Policy,
    optimizer: PolicyOptimizer,
    rows: TrainingRows,
    settings: UpdateSettings,
    *,
    seed: int,
    parity: ParityTolerance | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
    on_progress: Progress | None = None,
) -> UpdateResult:
    """Train the policy on the rows.

    With `settings.ema` the policy's average has to be begun before, and follows every step.

    Rows that other weights sampled skip the parity gate: their log-probs are expected to differ, and
    `settings.mismatch` corrects the difference.

    Args:
        rows: with finite advantages; without rows nothing changes.
        seed: decides the order of the rows.
        parity: allowed difference of stored and recomputed log-probs; None: the default for fp32.
        process_group: the processes that share the update; each has all rows and computes its part of them.
        on_progress: called with the number of passes done and their total, recomputation included.

    Raises:
        ParityError: stored and recomputed log-probs differ beyond the tolerance; no weight was changed.
        NonFiniteError: a loss or gradient is not finite; names the samples.
        ValueError: rows of other weights without a correction, or a KL without a reference.
    """
    if not len(rows):
        return UpdateResult({}, ())
    if not bool(rows.on_policy.all()) and settings.mismatch.mode == "none":
        raise ValueError("rows of other weights need a correction; set update.mismatch.mode to truncate or mask")
    minibatch_size = settings.minibatch_size or len(rows)
    tick = _counter(_all_passes(len(rows), minibatch_size, settings, process_group), on_progress)
    policy.prepare_for_update()
    rows = _with_recomputed(policy, rows, settings, process_group, tick)
    before = _measure(rows, parity or ParityTolerance(), settings)
    trained = trained_tokens(rows, settings)
    if not trained.any():
        return UpdateResult(before, ())
    steps = []
    for indices in minibatches(len(rows), minibatch_size, settings.epochs, seed):
        minibatch = make_minibatch(rows, indices, trained, settings)
        steps.append(optimizer_step(policy, optimizer, minibatch, settings, process_group, tick))
        if settings.ema is not None:
            policy.trained.update_average(1 - settings.ema)
    return UpdateResult(before, tuple(steps))


def _all_passes(rows: int, minibatch_size: int, settings: UpdateSettings, process_group: ProcessGroup) -> int:
    """Return the number of passes of one process: recomputation, then every minibatch of every epoch."""

    def passes(count: int) -> int:
        parts = -(-count // settings.micro_batch_size)
        return -(-parts // process_group.count)

    sizes = [min(minibatch_size, rows - start) for start in range(0, rows, minibatch_size)]
    return passes(rows) * (1 + settings.with_reference) + settings.epochs * sum(map(passes, sizes))


def _counter(total: int, report: Progress | None) -> Callable[[], None]:
    done = itertools.count(1)

    def tick() -> None:
        count = next(done)
        if report:
            report(count, total)

    return tick


@torch.no_grad()
def _with_recomputed(
    policy: Policy,
    rows: TrainingRows,
    settings: UpdateSettings,
    process_group: ProcessGroup,
    tick: Callable[[], None],
) -> TrainingRows:
    """Return the rows with old_logprobs, and with old_entropy and ref_logprobs where the settings need them."""
    entropy = settings.entropy_quantile < 1

    def for_all_rows(score: Callable[[TokenBatch], list[Tensor]], quantities: int) -> list[Tensor]:
        """Score each process's share of the rows; every process gets all scores, [rows, time] each, on the CPU."""
        scores = torch.zeros(quantities, *rows.tokens.token_ids.shape)
        lengths = rows.tokens.loss_mask.sum(-1).tolist()
        for part, counts in share(microbatches(lengths, settings.micro_batch_size), process_group):
            scored = torch.stack(score(rows.tokens.select(part).trimmed())).cpu()
            if counts:
                scores[:, part, : scored.shape[-1]] = scored
            tick()
        return list(process_group.add(scores))

    def under_policy(tokens: TokenBatch) -> list[Tensor]:
        scored = policy.logprobs(tokens, entropy=entropy)
        return [scored.logprobs, scored.entropy][: 1 + entropy]

    old = for_all_rows(under_policy, 1 + entropy)
    rows = replace(rows, old_logprobs=old[0], old_entropy=old[1] if entropy else None)
    if not settings.with_reference:
        return rows
    return replace(rows, ref_logprobs=for_all_rows(lambda tokens: [policy.reference_logprobs(tokens)], 1)[0])


def _measure(rows: TrainingRows, tolerance: ParityTolerance, settings: UpdateSettings) -> dict[str, float]:
    """Check parity on the rows that these weights sampled, then measure the mismatch to the sampler over all rows."""
    assert rows.old_logprobs is not None, "they have just been recomputed"
    own = rows.on_policy
    if own.any():
        names = [sample_id for sample_id, mine in zip(rows.sample_ids, own.tolist(), strict=True) if mine]
        report = measure_parity(names, rows.rollout_logprobs[own], rows.old_logprobs[own], rows.tokens.loss_mask[own])
        require_parity(report, tolerance)
    mask, mismatch = rows.tokens.loss_mask, settings.mismatch
    metrics = measure_parity(rows.sample_ids, rows.rollout_logprobs, rows.old_logprobs, mask).metrics()
    if mismatch.mode == "none":
        return metrics
    weights = mismatch_weights(rows.old_logprobs, rows.rollout_logprobs, mask, mismatch)
    return metrics | mismatch_metrics(weights, mask, mismatch.level)
