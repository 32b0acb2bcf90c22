"""The gate before the first optimizer step: on unchanged weights, recomputed log-probs must equal the stored ones.

Otherwise the update would follow a policy that never sampled these tokens, and no other check would show it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_core.errors import NonFiniteError
from grpo_core.rollouts.streams import Stream

LOGP_DIFFERENCE_MAX = "sampling/sampling_logp_difference/max"
"""Metric of an update: the largest |old - rollout|, nats."""


@dataclass(frozen=True)
class ParityTolerance:
    """Largest allowed |old - rollout|, in nats; the defaults are for fp32, `of_rounding` gives those of 16 bits.

    Attributes:
        max_difference: over single tokens.
        mean_difference: over all tokens.
        share_beyond: share of the tokens that may differ by more than `max_difference`, as an engine's kernels do.
        rounding: the mean difference that 16 bits are expected to make; 0 in fp32.
    """

    max_difference: float = 1e-3
    mean_difference: float = 1e-4
    share_beyond: float = 0.0
    rounding: float = 0.0


BF16, FP16 = 2.0**-9, 2.0**-12
"""Unit roundoffs: the largest relative error of a value that is rounded to 16 bits."""


def of_rounding(
    logprobs: Float[Tensor, " tokens"], *, blocks: int, vocabulary: int, temperature: float, unit: float = BF16
) -> ParityTolerance:
    """Return the tolerance for a model of tokens that computes in 16 bits.

    Each block rounds the hidden state in its own direction, so logits are off by unit x sqrt(blocks) x their size: the
    deviation of Gaussian logits of this entropy, sqrt(2 (log vocabulary - entropy)), over a temperature below 1. A
    token of probability p moves with 1 - p of it. Measured means are about 1.6 times that, of which three times are
    allowed, and single tokens up to 25 times their scale, of which 40 (docs/is_it_learning.md).

    Args:
        logprobs: of the sampled tokens, as they were stored.
        vocabulary: number of ids that can be sampled.
        unit: the unit roundoff of the dtype.
    """
    surprise = -logprobs.double()
    spread = math.sqrt(2 * max(math.log(vocabulary) - float(surprise.mean()), _SMALLEST_SPREAD))
    scale = unit * math.sqrt(blocks) * spread / min(temperature, 1.0)
    # Where nearly every token is certain, the few that are not decide the mean.
    uncertain = max(float((1 - (-surprise).exp()).mean()), _LEAST_UNCERTAIN)
    expected = _MEASURED * scale * uncertain
    return ParityTolerance(_SINGLE_TOKENS * scale, _MARGIN * expected, rounding=expected)


_SMALLEST_SPREAD = 0.1
_LEAST_UNCERTAIN = 0.05
_MEASURED, _MARGIN, _SINGLE_TOKENS = 1.6, 3.0, 40.0


@dataclass(frozen=True)
class ParityReport:
    """How far recomputed log-probs are from the recorded ones, over the tokens of the loss mask.

    Attributes:
        max_difference: largest |old - rollout|, nats; mean_difference: their mean.
        ratio_min: smallest exp(old - rollout); ratio_max: the largest.
        rows_apart: samples with a difference of more than a tenth of the largest.
        worst_samples: ids of the samples with the largest differences, worst first.
        worst_differences: largest |old - rollout| of each of these.
        tokens_beyond: number of tokens with a difference above the limit that was asked for.
        sampled_by: the engine, in words; None: the policy itself.
        of_shared_prompts: the stored log-probs are those of whole rows, and the others of rows that share prompts.
    """

    max_difference: float
    mean_difference: float
    ratio_min: float
    ratio_max: float
    tokens: int
    rows: int
    rows_apart: int
    worst_samples: tuple[str, ...]
    stream: Stream = "tokens"
    worst_differences: tuple[float, ...] = ()
    tokens_beyond: int = 0
    sampled_by: str | None = None
    of_shared_prompts: bool = False

    def metrics(self) -> dict[str, float]:
        """Return the differences under the names that TRL's dashboards use."""
        return {
            "sampling/sampling_logp_difference/mean": self.mean_difference,
            LOGP_DIFFERENCE_MAX: self.max_difference,
        }


class ParityError(RuntimeError):
    """Stored and recomputed log-probs differ beyond the tolerance; no weight was changed."""

    def __init__(self, report: ParityReport, tolerance: ParityTolerance) -> None:
        self.report, self.tolerance = report, tolerance
        noun, sampler = _NOUNS[report.stream], f" of {report.sampled_by}" if report.sampled_by else ""
        allowed = f"allowed {tolerance.max_difference:.3g}"
        if tolerance.share_beyond:
            allowed += f" but for {tolerance.share_beyond:.2g} of the {noun}, found {report.tokens_beyond} beyond it"
        usual = f"; 16 bits round about {tolerance.rounding:.2g} here" if tolerance.rounding else ""
        compared = "shared prompt - whole row" if report.of_shared_prompts else "old - rollout"
        super().__init__(
            f"log-prob parity{sampler}: |{compared}| is at most {report.max_difference:.3g} nats ({allowed}) and "
            f"{report.mean_difference:.3g} on average (allowed {tolerance.mean_difference:.3g}{usual}), ratio "
            f"{report.ratio_min:.3g} to {report.ratio_max:.3g} over {report.tokens} {noun}; worst samples: "
            f"{', '.join(_worst(report))}. Likely cause: {likely_cause(report, tolerance)} No weight was changed."
        )

    def __reduce__(self) -> tuple[type["ParityError"], tuple[ParityReport, ParityTolerance]]:
        return type(self), (self.report, self.tolerance)


def _worst(report: ParityReport) -> list[str]:
    differences = report.worst_differences or (None,) * len(report.worst_samples)
    pairs = zip(report.worst_samples, differences, strict=True)
    return [name if difference is None else f"{name} ({difference:.3g})" for name, difference in pairs]


def likely_cause(report: ParityReport, tolerance: ParityTolerance | None = None) -> str:
    """Name the likely cause of differences of this size, from measurements on tiny models."""
    if report.of_shared_prompts:
        return (
            "a prompt that is computed once for its completions gives others than in whole rows, though a trial of the "
            "loaded model did not. With update.micro_batch_size 1 each row is computed whole."
        )
    rounding = 0.0 if tolerance is None else tolerance.rounding
    if rounding and report.mean_difference <= _MARGIN * rounding:
        return (
            "rounding in 16 bits, of single tokens: the mean is what this depth and entropy make. Raise "
            "update.parity.max_difference or share_beyond, or set policy.dtype to float32."
        )
    if report.rows >= 4 and report.rows_apart * 4 <= report.rows:
        return (
            f"a few rows only: their stored {_NOUNS[report.stream]} or mask may be damaged. Look at the worst samples, "
            "or collect the rollouts again."
        )
    return _CAUSES[report.stream](report) if report.sampled_by is None else _cause_of_an_engine(report)


def _cause_of_an_engine(report: ParityReport) -> str:
    if report.mean_difference <= _ROUNDING:
        return (
            "arithmetic: the engine computes in another dtype than it is said to, or with other kernels. Correct "
            "rollout.vllm.dtype, or raise update.parity.max_difference, mean_difference and share_beyond."
        )
    return (
        "another distribution on the engine's side: another adapter, or other base weights, than the policy's; "
        "log-probs before the temperature (--logprobs-mode has to be processed_logprobs); another temperature; a "
        "prompt that it truncated, or read with another tokenizer, chat template or image size. `grpo doctor` checks "
        "the server."
    )


def _cause_of_tokens(report: ParityReport) -> str:
    """Tell the causes on GLM-Image apart.

    Positions or padding: at most 1.7 to 9 nats. Temperature, or ids that cannot be sampled: at most 0.1 to 0.8, on
    average 0.008 to 0.06. bfloat16: at most 0.016, on average 0.003.
    """
    if report.max_difference > 1.5:
        return (
            "positions or padding: a forward pass without explicit position_ids or attention_mask is off by 1.7 to 9 "
            "nats. Compute both sides through the same policy."
        )
    if report.mean_difference > 0.005 or report.max_difference > 0.05:
        return (
            "another distribution on one side: temperature, the ids that can be sampled, or top-k and top-p "
            "truncation; or weights other than those that sampled. Compare the rollouts' stored sampler settings and "
            "policy_digest with this policy's."
        )
    return _ARITHMETIC


def _cause_of_denoising(report: ParityReport) -> str:
    """Tell the causes on tiny SD3 and GLM-Image pipelines apart.

    Tokens of another draft: at most 5.6 nats, on average 0.58. Guidance, noise level, window or number of steps: on
    average 2e-3 to 0.4. Adapters that were not loaded, a timestep off by one, or another precision: 2e-5 to 2e-4.
    """
    if report.max_difference > 1:
        return (
            "the images were made of other prompts or tokens than the stored ones. Compare the rollouts' prompts and "
            "drafts with what was sampled."
        )
    if report.mean_difference > 1e-3:
        return (
            "another distribution on one side: guidance, noise level, kind of noise, window, number of steps, or the "
            "schedule of sigmas. Compare the rollouts' stored settings with this policy's."
        )
    if report.mean_difference > 4e-5:
        return (
            "weights other than those that sampled, such as adapters that were not loaded, or arithmetic in another "
            "precision. Compare the rollouts' policy_digest with this policy's, and policy.dtype and autocast."
        )
    return _ARITHMETIC


_ROUNDING = 0.03
"""Largest mean difference, in nats, that is put down to 16 bits."""
_ARITHMETIC = (
    "arithmetic: another dtype, device, attention kernel or batch shape than the sampler's. If that is intended, "
    "raise update.parity.max_difference and mean_difference."
)
_CAUSES: Mapping[Stream, Callable[[ParityReport], str]] = MappingProxyType(
    {"tokens": _cause_of_tokens, "denoising": _cause_of_denoising}
)
_NOUNS: Mapping[Stream, str] = MappingProxyType({"tokens": "tokens", "denoising": "denoising steps"})


def measure_parity(
    sample_ids: Sequence[str],
    rollout_logprobs: Float[Tensor, "batch time"],
    old_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
    stream: Stream = "tokens",
    *,
    limit: float = ParityTolerance.max_difference,
    sampled_by: str | None = None,
) -> ParityReport:
    """Compare the two over the loss mask; arguments and errors as of `compare_logprobs`."""
    tokens = rollout_logprobs[loss_mask], old_logprobs[loss_mask], loss_mask.sum(-1)
    return compare_logprobs(sample_ids, *tokens, stream, limit=limit, sampled_by=sampled_by)


def compare_logprobs(
    sample_ids: Sequence[str],
    rollout_logprobs: Float[Tensor, " tokens"],
    old_logprobs: Float[Tensor, " tokens"],
    counts: Int[Tensor, " rows"],
    stream: Stream = "tokens",
    *,
    limit: float = ParityTolerance.max_difference,
    sampled_by: str | None = None,
) -> ParityReport:
    """Compare log-probs of the tokens of all rows, one row after another.

    NonFiniteError names samples whose log-probs are not finite; ValueError without tokens.

    Args:
        counts: number of tokens of each row.
        limit: difference beyond which tokens are counted.
        sampled_by: the engine, in words; None for the policy itself.
    """
    if not len(rollout_logprobs):
        raise ValueError("the loss mask is empty: there is no token to compare or to train on")
    row_of = torch.arange(len(counts)).repeat_interleave(counts)
    for quantity, logprobs, hint in (
        ("stored log-prob", rollout_logprobs, "The rollouts are damaged; collect them again."),
        ("recomputed log-prob", old_logprobs, "The weights or the stored tokens are damaged."),
    ):
        finite = torch.isfinite(logprobs)
        if not finite.all():
            raise NonFiniteError(quantity, [sample_ids[row] for row in row_of[~finite].unique().tolist()], hint)
    difference = old_logprobs - rollout_logprobs
    ratios = difference.double().exp()
    by_row = torch.zeros(len(counts), dtype=difference.dtype).scatter_reduce(0, row_of, difference.abs(), "amax")
    worst = by_row.argsort(descending=True)[:3].tolist()
    return ParityReport(
        max_difference=float(difference.abs().max()),
        mean_difference=float(difference.abs().double().mean()),
        ratio_min=float(ratios.min()),
        ratio_max=float(ratios.max()),
        tokens=len(difference),
        rows=len(by_row),
        rows_apart=int((by_row > 0.1 * by_row.max()).sum()),
        worst_samples=tuple(sample_ids[row] for row in worst),
        stream=stream,
        worst_differences=tuple(by_row[worst].tolist()),
        tokens_beyond=int((difference.abs() > limit).sum()),
        sampled_by=sampled_by,
    )


def share_of_tolerance(report: ParityReport, tolerance: ParityTolerance) -> float:
    """Return the largest part of what is allowed that the differences take; above 1 the gate refuses."""
    largest = report.max_difference / tolerance.max_difference
    if tolerance.share_beyond:
        largest = report.tokens_beyond / report.tokens / tolerance.share_beyond
    return max(largest, report.mean_difference / tolerance.mean_difference)


def require_parity(report: ParityReport, tolerance: ParityTolerance) -> None:
    """Raise ParityError unless the differences are within the tolerance."""
    if share_of_tolerance(report, tolerance) > 1:
        raise ParityError(report, tolerance)
