"""Random minibatches, what they count to, and the loss with its gradients over any split of them.

`GRPOTrainer._compute_loss` is called on a trainer that was never constructed: it carries the attributes that the
function reads, and its log-probs and entropies are given tensors.
"""

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_core.losses.microbatch_loss import LossInputs, TokenLoss, compute_microbatch_loss
from grpo_core.losses.reductions import Denominators, entropy_threshold, high_entropy_mask
from grpo_core.losses.settings import LOSSES, LossSettings
from grpo_core.rollouts.records import StepGaussians

MAX_COMPLETION_LENGTH = 11
TOKEN_LOSSES = [loss for loss, traits in LOSSES.items() if not traits.reads_gaussians]


@dataclass(frozen=True)
class Loss:
    """A loss with its gradients by log-probs and by entropy, and the terms of each microbatch."""

    value: float
    logprobs: Tensor
    entropy: Tensor
    terms: tuple[TokenLoss, ...]


def random_inputs(seed: int, *, rows: int = 6, time: int = 7, spread: float = 0.6) -> LossInputs:
    """Ragged rows, one of them empty; both signs of advantage and a zero; ratios on both sides of any clip."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, time + 1, (rows,), generator=generator)
    advantages = normal(rows)
    if rows > 1:
        empty, zero = torch.randperm(rows, generator=generator)[:2].tolist()
        lengths[empty], advantages[zero] = 0, 0.0
    old = -normal(rows, time).abs() - 0.5
    entropy = normal(rows, time).abs().float().double()
    mask = torch.arange(time) < lengths.unsqueeze(-1)
    return LossInputs(
        logprobs=old + spread * normal(rows, time),
        old_logprobs=old,
        advantages=advantages,
        loss_mask=mask,
        rollout_logprobs=old + 0.8 * normal(rows, time),
        ref_logprobs=old + spread * normal(rows, time),
        entropy=entropy,
        entropy_mask=(entropy > 0.6) & mask,
    )


def select(inputs: LossInputs, rows: Sequence[int]) -> LossInputs:
    """The rows with these indices."""
    index = torch.as_tensor(rows, dtype=torch.long)
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    chosen = {name: value[index] for name, value in values.items() if isinstance(value, Tensor)}
    if inputs.gaussians is not None:
        chosen["gaussians"] = StepGaussians(*(value[index] for value in vars(inputs.gaussians).values()))
    return LossInputs(**chosen)


def count(inputs: LossInputs, *, rollout_rows: int | None = None, rollout_tokens: int | None = None) -> Denominators:
    """Denominators of these rows as one minibatch, by default the whole rollout set."""
    mask = inputs.loss_mask
    entropy_mask = mask if inputs.entropy_mask is None else mask & inputs.entropy_mask
    tokens = int(mask.sum())
    return Denominators(
        rows=len(mask),
        tokens=tokens,
        entropy_tokens=int(entropy_mask.sum()),
        rollout_rows=rollout_rows or len(mask),
        rollout_tokens=rollout_tokens or tokens,
        max_completion_length=MAX_COMPLETION_LENGTH,
    )


def loss_of(
    inputs: LossInputs,
    settings: LossSettings,
    denominators: Denominators | None = None,
    split: Sequence[Sequence[int]] | None = None,
) -> Loss:
    """The loss of a minibatch, summed over its microbatches; gradients in the order of the minibatch's rows."""
    denominators = denominators or count(inputs)
    rows = range(len(inputs.loss_mask))
    value, terms = 0.0, []
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    entropy = None if inputs.entropy is None else inputs.entropy.detach().clone().requires_grad_()
    whole = replace(inputs, logprobs=logprobs, entropy=entropy)
    for part in split or [rows]:
        loss, tokens = compute_microbatch_loss(select(whole, part), settings, denominators)
        loss.backward()
        value += float(loss.detach())
        terms.append(tokens)
    assert logprobs.grad is not None
    zero = torch.zeros_like(logprobs)
    entropy_gradient = zero if entropy is None or entropy.grad is None else entropy.grad
    return Loss(value, logprobs.grad, entropy_gradient, tuple(terms))


IDENTITY = SimpleNamespace(
    num_processes=1,
    sync_gradients=True,
    gather=lambda value: value,
    reduce=lambda value, reduction: value,
    pad_across_processes=lambda value, dim, pad_index: value,
)


@dataclass(frozen=True)
class TrlLoss:
    """TRL's loss over the microbatches of a minibatch, its gradients, and its metrics of the last of them."""

    value: float
    logprobs: Tensor
    entropy: Tensor
    metrics: dict[str, float]


def configured(loss: str, **options: Any) -> LossSettings:
    """Settings that both sides have; the level is the loss's own unless given."""
    cap = {"ratio_cap": 1.4} if loss == "cispo" else {}
    return LossSettings(loss, clip_range_high=0.28, loss_settings=cap, **{"kl_importance_correction": False} | options)


def trl_trainer(settings: LossSettings, *, accumulation: int, per_generation: int, quantile: float) -> Any:
    """A trainer with the attributes that the loss reads."""
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    attributes = {
        "loss_type": "grpo" if settings.loss == "gspo" else settings.loss,
        "importance_sampling_level": settings.level,
        "epsilon_low": settings.clip_range,
        "epsilon_high": settings.own.get("ratio_cap", settings.upper_clip_range),
        "beta": settings.kl_coef,
        "entropy_coef": settings.entropy_coef,
        "_entropy_bonus_enabled": settings.entropy_coef != 0.0,
        "use_adaptive_entropy": False,
        "top_entropy_quantile": quantile,
        "off_policy_mask_threshold": settings.off_policy_threshold,
        "use_vllm": settings.mismatch.mode != "none",
        "vllm_importance_sampling_correction": settings.mismatch.mode != "none",
        "aux_loss_enabled": False,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "current_gradient_accumulation_steps": accumulation,
        "model": SimpleNamespace(training=True),
        "accelerator": IDENTITY,
        "_metrics": {"train": defaultdict(list)},
        "args": SimpleNamespace(
            delta=settings.delta,
            use_bias_correction_kl=settings.kl_importance_correction,
            **{name: value for name, value in settings.own.items() if name != "ratio_cap"},
            steps_per_generation=per_generation,
        ),
    }
    if settings.mismatch.mode != "none":
        attributes |= {
            "vllm_importance_sampling_mode": f"{settings.mismatch.level}_{settings.mismatch.mode}",
            "vllm_importance_sampling_clip_max": settings.mismatch.cap,
            "vllm_importance_sampling_clip_min": settings.mismatch.floor or None,
        }
    vars(trainer).update(attributes)
    return trainer


@cache
def trl_sampling_block() -> CodeType:
    """The lines of `_generate_and_score_completions` that correct for the sampler, cut out of TRL's source."""
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    blocks = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and any(isinstance(line, ast.Assign) and "logps_diff" in ast.unparse(line.targets[0]) for line in node.body)
        and "use_vllm" in ast.unparse(node.test)
    ]
    assert len(blocks) == 1
    return compile(ast.Module(blocks[0].body, []), "trl", "exec")


def trl_sampling_ratio(trainer: Any, inputs: LossInputs) -> Tensor:
    """TRL's weights of the policy term: [batch, time], or [batch, 1] at sequence level."""
    names = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "completion_mask": inputs.loss_mask.long(),
        "tool_mask": None,
        "old_per_token_logps": inputs.old_logprobs,
        "sampling_per_token_logps": inputs.rollout_logprobs,
    }
    exec(trl_sampling_block(), names)
    ratio = names["vllm_importance_sampling_ratio"]
    assert isinstance(ratio, Tensor)
    return ratio


def trl_loss(
    inputs: LossInputs,
    settings: LossSettings,
    *,
    split: Sequence[Sequence[int]] | None = None,
    per_generation: int | None = None,
    rollout_tokens: int | None = None,
    quantile: float = 1.0,
    first_step: bool = False,
) -> TrlLoss:
    """TRL's loss and gradients, accumulated over microbatches; it has no old log-probs on the first step."""
    parts = split or [range(len(inputs.loss_mask))]
    steps = len(parts)
    trainer = trl_trainer(settings, accumulation=steps, per_generation=per_generation or steps, quantile=quantile)
    logprobs = inputs.logprobs.detach().clone().requires_grad_()
    assert inputs.entropy is not None
    entropy = inputs.entropy.detach().clone().requires_grad_()
    value = 0.0
    for part in parts:
        rows = torch.as_tensor(list(part))
        chunk = select(inputs, list(part))
        mask = chunk.loss_mask.long()
        trainer._get_per_token_logps_and_entropies = lambda *_, rows=rows, **__: (logprobs[rows], entropy[rows], None)
        batch = {
            "prompt_ids": mask[:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": chunk.advantages,
            "old_per_token_logps": None if first_step else chunk.old_logprobs,
            "ref_per_token_logps": chunk.ref_logprobs,
            "num_items_in_batch": torch.tensor(rollout_tokens or int(inputs.loss_mask.sum())),
        }
        if chunk.rollout_logprobs is not None:
            batch["sampling_per_token_logps"] = chunk.rollout_logprobs
        if settings.mismatch.mode != "none":
            batch["importance_sampling_ratio"] = trl_sampling_ratio(trainer, chunk)
        loss = trainer._compute_loss(None, batch)
        loss.backward()
        value += float(loss.detach())
    assert logprobs.grad is not None
    entropy_gradient = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return TrlLoss(value, logprobs.grad, entropy_gradient, metrics)


def with_entropy_mask(inputs: LossInputs, share: float) -> LossInputs:
    """The mask over the whole minibatch; entropies are fp32, as scoring gives them."""
    assert inputs.entropy is not None
    threshold = entropy_threshold(inputs.entropy[inputs.loss_mask].float(), share)
    return replace(inputs, entropy_mask=high_entropy_mask(inputs.entropy, inputs.loss_mask, threshold=threshold))


def require_equal(ours: Loss, theirs: TrlLoss) -> None:
    assert ours.value == pytest.approx(theirs.value, rel=1e-6, abs=1e-12)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(ours.entropy, theirs.entropy, rtol=1e-6, atol=1e-12)
