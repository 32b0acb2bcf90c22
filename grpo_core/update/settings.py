"""How rows become optimizer steps: minibatches, microbatches, the optimizer, the learning rate by step."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from grpo_core.errors import InputError
from grpo_core.losses.settings import LossSettings
from grpo_core.rollouts.streams import Stream
from grpo_core.settings import check_fields
from grpo_core.update.optimizer_kinds import OPTIMIZERS, OptimizerKind, OptimizerValue

PASSES_SAVED = "old_logprobs/passes_saved"
"""Metric: microbatches whose stored log-probs stood for recomputed ones; 0 where all were recomputed."""

VELOCITY_NORM = "velocity/norm_ratio"
"""Metric: norm of the velocity over that of the reference's, mean over images and steps."""

PARITY_SHARE = "sampling/sampling_logp_difference/share_of_tolerance"
"""Metric of the parity gate: the larger of its differences over what it allows."""


BackwardPerStep = Literal["auto"] | bool


@dataclass(frozen=True)
class StepSettings:
    """Sizes and limits of the optimizer steps of one update, whatever its loss.

    Attributes:
        epochs: passes over the rows.
        minibatch_size: rows per optimizer step; None: all of them.
        minibatches: in place of minibatch_size: the rows over this number, rounded up, are those of an optimizer step.
        micro_batch_size: rows per forward and backward pass; changes memory, not the gradient.
        max_grad_norm: gradients are scaled to this norm.
        ema: decay d of an average of the trained parameters: d * average + (1 - d) * parameter after every optimizer
            step, in fp32. Evaluations sample with it, training does not. None: none.
    """

    epochs: PositiveInt = 1
    minibatch_size: PositiveInt | None = None
    minibatches: PositiveInt | None = None
    micro_batch_size: PositiveInt = 8
    max_grad_norm: PositiveFloat = 1.0
    ema: Annotated[float | None, Field(gt=0, lt=1)] = None

    def rows_per_step(self, rows: int) -> int:
        """Return the rows of one optimizer step in an update of this many."""
        if self.minibatches is not None:
            return -(-rows // self.minibatches)
        return self.minibatch_size or rows

    def refuse_two_sizes(self) -> None:
        """Raise InputError if both minibatch_size and minibatches are set."""
        if self.minibatch_size is not None and self.minibatches is not None:
            hint = "It is the rows of an optimizer step, or minibatches their number; leave out one of them."
            raise InputError("update.minibatch_size", self.minibatch_size, hint)

    def old_policy_decay(self, update: int) -> float:
        """Return the share of the policy that sampled in the one that samples after an update (its number, from 1)."""
        return 0.0


@dataclass(frozen=True)
class UpdateSettings(LossSettings, StepSettings):
    """Options of one update by a policy loss, added to those of the loss and of the optimizer steps.

    Attributes:
        entropy_quantile: share of a minibatch's tokens, those of highest entropy before the update, that have a policy
            term (Wang et al., 2025, "Beyond the 80/20 rule", arXiv:2506.01939).
        mask_truncated: rows that were cut off at their maximum length stay out of the loss (DAPO, arXiv:2503.14476);
            they still count in their groups.
        backward_per_step: of denoising, a backward pass for each noisy step in place of one for the whole window, which
            keeps all steps' activations; changes memory, not the gradient. A loss that couples a row's steps then needs
            one more pass without gradients. auto: where the whole window is estimated not to fit on the GPU.
        old_logprobs: recompute: of every row, before the first step. auto: the stored ones stand for them where they
            are equal to the bit in all of the first minibatch and in up to four other rows, all of which the policy
            itself sampled; a difference in one of the remaining rows alone would not be seen.
    """

    entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    mask_truncated: bool = False
    backward_per_step: BackwardPerStep = "auto"
    old_logprobs: Literal["auto", "recompute"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_two_sizes()

    @property
    def with_reference(self) -> bool:
        """Whether the reference is needed."""
        return self.kl_coef > 0

    @property
    def with_reference_logprobs(self) -> bool:
        """Whether the reference's log-probs are needed before the first step; the exact KL is computed in each pass."""
        return self.with_reference and self.kl_estimator != "exact"

    def unfit(self, stream: Stream) -> Iterator[tuple[str, object, str]]:
        """Yield each setting that rows of a stream cannot be trained with: its name, its value and a hint."""
        if stream == "denoising":
            same = "All steps of the window have the same noise level, and their entropy has no gradient; leave it out."
            if self.entropy_coef > 0:
                yield "entropy_coef", self.entropy_coef, same
            if self.entropy_quantile < 1:
                yield "entropy_quantile", self.entropy_quantile, same
            if self.mask_truncated:
                yield "mask_truncated", True, "Denoising is never truncated; leave it out."
            return
        if self.kl_estimator == "exact":
            hint = "The KL in closed form is one of Gaussian denoising steps; of tokens use k1, k2 or k3."
            yield "kl_estimator", "exact", hint
        if self.traits.reads_gaussians:
            hint = f"{self.loss} measures Gaussian denoising steps; choose another loss for tokens, such as grpo."
            yield "loss", self.loss, hint
        if self.backward_per_step is True:
            yield "backward_per_step", True, "All tokens of a row are one pass, and one backward pass; leave it out."


def minibatches(rows: int, minibatch_size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Yield the row indices of each minibatch; every epoch has each row once, in a new order."""
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(rows).tolist()
        for start in range(0, rows, minibatch_size):
            yield order[start : start + minibatch_size]


Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "warmup_stable_decay",
]
ScheduleValue = float | int | str | bool

WITH_LENGTH = frozenset(
    {"linear", "cosine", "cosine_with_restarts", "polynomial", "cosine_with_min_lr", "warmup_stable_decay"}
)
WITHOUT_KWARGS = frozenset({"constant", "constant_with_warmup", "linear"})
PROBES = 64
Decay = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101), or another optimizer.

    Attributes:
        learning_rate: after warm-up.
        betas: decay of the first and second moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled but for sgd; norms and biases have none, as in transformers' Trainer.
        lr_scheduler: name of a transformers schedule.
        warmup_steps: optimizer steps from zero to the learning rate.
        optimizer: `adamw_8bit` keeps the moments in 8 bits (Dettmers et al., 2022, arXiv:2110.02861), of parameters
            with fewer than 4096 elements in fp32; `paged_adamw` (in fp32) and `paged_adamw_8bit` in memory that CUDA
            moves to the host when the GPU's runs out. `lion` (Chen et al., 2023, arXiv:2302.06675) and `lion_8bit` keep
            one moment, `sgd` one unless its momentum is 0, `adafactor` (Shazeer and Stern, 2018, arXiv:1804.04235) rows
            and columns. `muon` (Liu et al., 2025, arXiv:2502.16982) takes matrices only, so adapters.
        optimizer_kwargs: further arguments of the optimizer's class: momentum (0.9), dampening and nesterov of sgd;
            beta2_decay and d of adafactor; momentum, nesterov, ns_steps and adjust_lr_fn (match_rms_adamw) of muon.
        total_steps: length of the schedule in optimizer steps, warm-up included, where it has one.
        lr_scheduler_kwargs: further arguments of the schedule's function in transformers.
        offload_optimizer: keep the moments of adamw in CPU memory; a step brings those of one parameter at a time to
            the device, and results do not change.
    """

    learning_rate: NonNegativeFloat
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    lr_scheduler: Schedule = "constant"
    warmup_steps: NonNegativeInt = 0
    optimizer: OptimizerKind = "adamw"
    optimizer_kwargs: Mapping[str, OptimizerValue] = field(default_factory=dict)
    total_steps: PositiveInt | None = None
    lr_scheduler_kwargs: Mapping[str, ScheduleValue] = field(default_factory=dict)
    offload_optimizer: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "update")
        for name, value, hint in self.foreign_to_the_optimizer():
            raise InputError(f"update.{name}", value, hint)
        self.schedule()

    def foreign_to_the_optimizer(self) -> Iterator[tuple[str, object, str]]:
        """Yield each setting that the optimizer does not have, or cannot take: its name, its value and a hint."""
        traits = OPTIMIZERS[self.optimizer]
        given = dict(self.optimizer_kwargs)
        found = [*traits.unfit(self.optimizer, {"betas": self.betas, "eps": self.eps}, given)]
        yield from found
        if found or not given:
            return
        # Importing it takes a second, and most configurations have no such arguments.
        import torch

        try:
            traits.make([torch.zeros(1, 1)], self.learning_rate, given)
        except (TypeError, ValueError) as error:
            yield "optimizer_kwargs", given, f"{traits.name} cannot be made with these values ({error})."

    def schedule(self) -> "LearningRateSchedule":
        """The learning rate of each step."""
        return LearningRateSchedule(self)


class LearningRateSchedule:
    """One of transformers' schedules as a function of the step.

    One that depends on the length of the run keeps the rate of step `total_steps` from there on.
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        """Prepare the schedule; InputError for a missing or short length, or values it cannot be computed with."""
        name, given = settings.lr_scheduler, dict(settings.lr_scheduler_kwargs)
        self._last = settings.total_steps if name in WITH_LENGTH else None
        if name in WITH_LENGTH:
            _refuse_length(settings)
        if given and name in WITHOUT_KWARGS:
            raise InputError("update.lr_scheduler_kwargs", given, f"{name} has no arguments; leave them out.")
        self._learning_rate = settings.learning_rate
        try:
            self._multiplier = self._built(settings)
            rates = [self(step) for step in self._probes(settings.warmup_steps)]
        except (TypeError, ValueError, ArithmeticError) as error:
            hint = f"{name} cannot be computed with these values ({error})."
            raise InputError("update.lr_scheduler_kwargs", given, hint) from error
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            hint = f"{name} would give rates from {min(rates):g} to {max(rates):g}; none may be below zero."
            raise InputError("update.lr_scheduler_kwargs", given, hint)

    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` earlier steps."""
        reached = step if self._last is None else min(step, self._last)
        return float(self._learning_rate * self._multiplier(reached))

    def _built(self, settings: OptimizerSettings) -> Callable[[int], float]:
        if settings.lr_scheduler == "constant":
            return lambda step: 1.0
        # Importing its schedules takes seconds, and the checks of most configurations need none of them.
        import torch
        from transformers import get_scheduler

        # transformers builds a schedule for an optimizer; this one only provides the learning rate.
        dummy_optimizer = torch.optim.SGD([torch.zeros(1)], lr=settings.learning_rate)
        scheduler = get_scheduler(
            settings.lr_scheduler,
            dummy_optimizer,
            settings.warmup_steps,
            self._last,
            scheduler_specific_kwargs=dict(settings.lr_scheduler_kwargs),
        )
        multiplier: Callable[[int], float] = scheduler.lr_lambdas[0]
        return multiplier

    def _probes(self, warmup_steps: int) -> list[int]:
        end = 2 * warmup_steps + PROBES if self._last is None else self._last
        parts = (end * part // PROBES for part in range(PROBES + 1))
        return sorted({0, max(warmup_steps - 1, 0), warmup_steps, *parts})


def _refuse_length(settings: OptimizerSettings) -> None:
    name, total, warmup = settings.lr_scheduler, settings.total_steps, settings.warmup_steps
    kwargs = dict(settings.lr_scheduler_kwargs)
    if total is None:
        hint = "It depends on the length of the run; set update.total_steps, or use constant_with_warmup."
        raise InputError("update.lr_scheduler", name, hint)
    if warmup >= total:
        hint = f"{name} has {total} optimizer steps in all; warm up for fewer."
        raise InputError("update.warmup_steps", warmup, hint)
    if name != "warmup_stable_decay":
        return
    decay = kwargs.get("num_decay_steps")
    if not isinstance(decay, int) or isinstance(decay, bool) or not 0 <= decay <= total - warmup:
        hint = f"Set num_decay_steps, an integer from 0 to {total - warmup}: what warm-up leaves."
        raise InputError("update.lr_scheduler_kwargs", kwargs, hint)
    if "num_stable_steps" in kwargs:
        hint = "Leave out num_stable_steps: it is total_steps without warm-up and decay."
        raise InputError("update.lr_scheduler_kwargs", kwargs, hint)
