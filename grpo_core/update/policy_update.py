"""Train a component of a policy on stored rows; the parity gate comes before the first optimizer step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_core.errors import InputError, raise_all
from grpo_core.losses.ratios import counted_weights, mismatch_metrics, mismatch_weights
from grpo_core.losses.settings import MismatchSettings
from grpo_core.parity import ParityTolerance, compare_logprobs, require_parity, share_of_tolerance
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.rollouts.actions import Actions
from grpo_core.rollouts.ragged import Ragged, RaggedRows
from grpo_core.rollouts.records import Entropies, TrainingRows
from grpo_core.transfers import to_host
from grpo_core.update.gradient import Minibatch, Passes, add_up_gradient, make_minibatch, trained_actions
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.process_group import SINGLE_PROCESS, ProcessGroup, share
from grpo_core.update.settings import PARITY_SHARE, PASSES_SAVED, UpdateSettings, minibatches
from grpo_core.update.step import (
    Progress,
    StepMetrics,
    Tick,
    UpdateResult,
    counter,
    keeping_old,
    no_gradient_of_a_refused_update,
    optimizer_step,
)
from grpo_core.update.witnesses import require_witnesses_agree, stored_logprobs_stand, witness_logprobs


def update_policy(
    component: PolicyComponent,
    optimizer: PolicyOptimizer,
    rows: RaggedRows | TrainingRows,
    settings: UpdateSettings,
    *,
    seed: int,
    parity: ParityTolerance | None = None,
    sampled_by: str | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
    on_progress: Progress | None = None,
) -> UpdateResult:
    """Train the component on the rows of its stream.

    The first minibatch's passes run on the weights before the update, so they give its old_logprobs as well; those of
    the other rows are computed before the first step, unless `settings.old_logprobs` lets the stored ones stand. The
    gate compares what was computed with what is stored before the first step, but for rows that other weights sampled,
    whose difference `settings.mismatch` corrects. With `settings.ema` the component has to keep its average before,
    which follows every step.

    Args:
        rows: with finite advantages, held without padding; without rows nothing changes.
        seed: decides the order of the rows.
        parity: allowed difference of stored and recomputed log-probs; None: the default for fp32.
        sampled_by: the engine that sampled the rows, in words; None: the policy itself.
        process_group: the processes that share the update; each has all rows and computes its part of them.
        on_progress: called with the number of passes done and their total, those without gradients included.

    Raises:
        InputError: settings that rows of this stream cannot be trained with, such as an entropy of denoising steps.
        ParityError: stored and recomputed log-probs differ beyond the tolerance; no weight was changed.
        NonFiniteError: a loss or gradient is not finite; names the samples.
        ValueError: rows of other weights without a correction, or a KL without a reference.
    """
    rows = RaggedRows.of(rows) if isinstance(rows, TrainingRows) else rows
    if not len(rows):
        return UpdateResult({}, ())
    raise_all(InputError(f"update.{name}", value, hint) for name, value, hint in settings.unfit(rows.actions.stream))
    if not bool(rows.on_policy.all()) and settings.mismatch.mode == "none":
        raise ValueError("rows of other weights need a correction; set update.mismatch.mode to truncate or mask")
    trained = trained_actions(rows, settings)
    minibatch_size = settings.rows_per_step(len(rows))
    first, *later = minibatches(len(rows), minibatch_size, settings.epochs, seed)
    # An entropy threshold has to be known before the first pass with gradients.
    with_own_pass = set(first) if trained.values.any() and settings.entropy_quantile == 1 else set()
    others = [row for row in range(len(rows)) if row not in with_own_pass]
    may_stand = settings.old_logprobs == "auto" and bool(with_own_pass and others and rows.on_policy.all())
    reference_rows = list(range(len(rows))) if settings.with_reference_logprobs else []
    shares = (
        share(component.microbatches(rows, each, settings.micro_batch_size), process_group)
        for each in (others, reference_rows, first, *later)
    )
    tick = counter(sum(map(len, shares)), on_progress)
    scoring = _Scoring(component, settings, process_group, tick)
    component.prepare_for_update(rows.actions)
    witnesses = witness_logprobs(component, rows, settings.micro_batch_size)
    rows = scoring.with_reference(scoring.with_old(rows, [] if may_stand else others))
    if not trained.values.any():
        return UpdateResult(_measure(rows, witnesses, parity, settings, sampled_by), ())

    def gradient(known: RaggedRows, indices: list[int]) -> tuple[Minibatch, Passes]:
        optimizer.zero_grad()
        minibatch = make_minibatch(known, indices, trained, settings)
        return minibatch, add_up_gradient(component, minibatch, settings, process_group, tick)

    def step(minibatch: Minibatch, passes: Passes) -> StepMetrics:
        names = minibatch.sample_ids
        made = optimizer_step(component, optimizer, names, passes.broken, settings, process_group)
        return passes.sums.metrics(
            process_group, made, with_reference=settings.with_reference, with_entropy=not passes.of_gaussians
        )

    with no_gradient_of_a_refused_update(optimizer):
        minibatch, passes = gradient(replace(rows, old_logprobs=None), first)
        own, saved = process_group.add(passes.logprobs.values), dict[str, float]()
        if may_stand:
            rows, saved = scoring.with_stored_or_old(rows, first, own, others)
        rows = _with_old_logprobs(rows, first, own)
        before = _measure(rows, witnesses, parity, settings, sampled_by) | saved
        with keeping_old(component, needed=settings.measures_drift and passes.of_gaussians and bool(later)):
            steps = [step(minibatch, passes)]
            steps += [step(*gradient(rows, indices)) for indices in later]
    return UpdateResult(before, tuple(steps))


@dataclass(frozen=True)
class _Scoring:
    """Passes without gradients over an update's rows, each process over its share of them."""

    component: PolicyComponent
    settings: UpdateSettings
    process_group: ProcessGroup
    tick: Tick

    @torch.no_grad()
    def _scores(
        self, rows: RaggedRows, chosen: list[int], score: Callable[[Actions], list[Tensor]], quantities: int
    ) -> list[Ragged]:
        """Score each process's share of the chosen rows; every process gets all scores, on the CPU."""
        found = torch.zeros(quantities, len(rows.loss_mask.values))
        by_row = [rows.loss_mask.like(values) for values in found]
        parts, scored = list[list[int]](), list[Tensor]()
        microbatches = self.component.microbatches(rows, chosen, self.settings.micro_batch_size)
        for places, counts in share(microbatches, self.process_group):
            part = [chosen[place] for place in places]
            each = torch.stack(score(rows.actions.select(part).trimmed()))
            if counts:
                parts.append(part)
                scored.append(each)
            self.tick()
        for part, each in zip(parts, to_host(scored), strict=True):
            for kept, scores_of_part in zip(by_row, each, strict=True):
                kept.put(part, scores_of_part)
        return [rows.loss_mask.like(values) for values in self.process_group.add(found)]

    def with_old(self, rows: RaggedRows, chosen: list[int]) -> RaggedRows:
        """Return the rows with old_logprobs of the chosen ones, and with old_entropy if the settings need it."""
        entropy: Entropies = "constant" if self.settings.entropy_quantile < 1 else "none"

        def under_policy(actions: Actions) -> list[Tensor]:
            scored = self.component.logprobs(actions, entropy=entropy)
            if entropy == "none" or scored.entropy is None:
                return [scored.logprobs]
            return [scored.logprobs, scored.entropy]

        old = self._scores(rows, chosen, under_policy, 1 if entropy == "none" else 2)
        return replace(rows, old_logprobs=old[0], old_entropy=old[1] if len(old) == 2 else None)

    def with_stored_or_old(
        self, rows: RaggedRows, first: list[int], own: Tensor, others: list[int]
    ) -> tuple[RaggedRows, dict[str, float]]:
        """Return the rows with old_logprobs of the others, and how many passes their stored ones have saved.

        Args:
            own: recomputed log-probs of the first minibatch.
        """
        if not stored_logprobs_stand(self.component, rows, first, own, others, self.process_group):
            return self.with_old(rows, others), {PASSES_SAVED: 0.0}
        passes = self.component.microbatches(rows, others, self.settings.micro_batch_size)
        self.tick(len(share(passes, self.process_group)))
        return replace(rows, old_logprobs=rows.rollout_logprobs), {PASSES_SAVED: float(len(passes))}

    def with_reference(self, rows: RaggedRows) -> RaggedRows:
        """Return the rows with ref_logprobs, if the settings need them."""
        if not self.settings.with_reference_logprobs:
            return rows
        with self.component.as_reference():
            every, score = list(range(len(rows))), self.component.reference_logprobs
            (reference,) = self._scores(rows, every, lambda actions: [score(actions)], 1)
        return replace(rows, ref_logprobs=reference)


def _with_old_logprobs(rows: RaggedRows, indices: list[int], logprobs: Tensor) -> RaggedRows:
    known = rows.old_logprobs
    assert known is not None, "those of the other rows have been computed"
    return replace(rows, old_logprobs=known.like(known.values.index_copy(0, known.places(indices), logprobs)))


def _measure(
    rows: RaggedRows,
    witnesses: Mapping[int, Tensor],
    parity: ParityTolerance | None,
    settings: UpdateSettings,
    sampled_by: str | None,
) -> dict[str, float]:
    """Check parity on the rows that these weights sampled, then measure the mismatch to the sampler over all rows."""
    assert rows.old_logprobs is not None, "they are computed before the first step"
    own, mask, gate = rows.on_policy, rows.loss_mask.values, dict[str, float]()
    stored, found, counts = rows.rollout_logprobs.values[mask], rows.old_logprobs.values[mask], rows.loss_mask.sums()
    if witnesses:
        require_witnesses_agree(rows, witnesses, parity or ParityTolerance())
    if own.any():
        names = [sample_id for sample_id, mine in zip(rows.sample_ids, own.tolist(), strict=True) if mine]
        allowed, by_own = parity or ParityTolerance(), own.repeat_interleave(counts)
        report = compare_logprobs(
            names,
            stored[by_own],
            found[by_own],
            counts[own],
            rows.actions.stream,
            limit=allowed.max_difference,
            sampled_by=sampled_by,
        )
        require_parity(report, allowed)
        gate = {PARITY_SHARE: share_of_tolerance(report, allowed)}
    metrics = gate | compare_logprobs(rows.sample_ids, stored, found, counts).metrics()
    if settings.mismatch.mode == "none":
        return metrics
    starts = range(0, len(rows), _ROWS_AT_ONCE)
    parts = (rows.select(range(start, min(start + _ROWS_AT_ONCE, len(rows)))) for start in starts)
    return metrics | mismatch_metrics(torch.cat([_mismatch_weights(part, settings.mismatch) for part in parts]))


_ROWS_AT_ONCE = 64
"""Rows that are padded together to measure the mismatch."""


def _mismatch_weights(part: TrainingRows, mismatch: MismatchSettings) -> Tensor:
    assert part.old_logprobs is not None, "they are computed before the first step"
    mask = part.actions.loss_mask
    weights = mismatch_weights(part.old_logprobs, part.rollout_logprobs, mask, mismatch)
    return counted_weights(weights, mask, mismatch.level)
