"""Train a policy on stored rows; the parity gate comes before the first optimizer step."""

from collections.abc import Callable

from grpo_core.optimizer import PolicyOptimizer
from grpo_core.parity import ParityReport, ParityTolerance, measure_parity, require_parity
from grpo_core.policies.protocol import Policy
from grpo_core.records import TrainingRows
from grpo_core.update.batches import minibatches
from grpo_core.update.metrics import UpdateResult
from grpo_core.update.process_group import SINGLE_PROCESS, ProcessGroup
from grpo_core.update.recompute import passes, with_recomputed
from grpo_core.update.settings import UpdateSettings
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

    Rows that other weights sampled skip the parity gate: their log-probs are expected to differ, and
    `settings.mismatch` corrects the difference.

    Args:
        policy: with the weights before the update.
        optimizer: over the policy's trainable parameters.
        rows: with finite advantages; without rows nothing changes.
        settings: epochs, sizes, loss, limits.
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
    per_epoch = list(minibatches(len(rows), minibatch_size, 1, seed))
    ticks = _Ticks(_all_passes(rows, settings, process_group, per_epoch), on_progress)
    policy.prepare_for_update()
    rows = with_recomputed(policy, rows, settings, process_group, ticks.tick)
    before = _measure(rows, parity or ParityTolerance())
    rollout_tokens = int(trained_tokens(rows, settings).sum())
    if not rollout_tokens:
        return UpdateResult(before, ())
    steps = []
    for indices in minibatches(len(rows), minibatch_size, settings.epochs, seed):
        minibatch = make_minibatch(
            rows.select(indices),
            settings,
            rollout_rows=len(rows),
            rollout_tokens=rollout_tokens,
            max_length=policy.max_length,
        )
        steps.append(optimizer_step(policy, optimizer, minibatch, settings, process_group, ticks.tick))
    return UpdateResult(before, tuple(steps))


def _measure(rows: TrainingRows, tolerance: ParityTolerance) -> dict[str, float]:
    """Check parity on the rows that these weights sampled, then measure the mismatch to the sampler over all rows."""
    on_policy = rows.on_policy.nonzero().flatten().tolist()
    if on_policy:
        require_parity(_parity(rows.select(on_policy)), tolerance)
    return _parity(rows).metrics()


def _parity(rows: TrainingRows) -> ParityReport:
    assert rows.old_logprobs is not None, "they have just been recomputed"
    return measure_parity(rows.sample_ids, rows.rollout_logprobs, rows.old_logprobs, rows.tokens.loss_mask)


def _all_passes(
    rows: TrainingRows, settings: UpdateSettings, process_group: ProcessGroup, per_epoch: list[list[int]]
) -> int:
    parts = [-(-len(indices) // settings.micro_batch_size) for indices in per_epoch]
    rounds = sum(-(-count // process_group.count) for count in parts)
    return passes(rows, settings, process_group) + settings.epochs * rounds


class _Ticks:
    def __init__(self, total: int, report: Progress | None) -> None:
        self.done, self.total, self.report = 0, total, report

    def tick(self) -> None:
        self.done += 1
        if self.report:
            self.report(self.done, self.total)
