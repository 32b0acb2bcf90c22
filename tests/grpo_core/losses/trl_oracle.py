"""TRL's own loss, run unmodified over given tensors.

`GRPOTrainer._compute_loss` is called on a trainer that was never constructed: it carries the attributes that the
function reads, and its log-probs and entropies are given tensors.
"""

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_core.losses import (
    LossInputs,
    LossSettings,
    entropy_threshold,
    high_entropy_mask,
)
from tests.grpo_core.losses.batches import MAX_COMPLETION_LENGTH, Loss, select

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
    return LossSettings(loss, clip_range_high=0.28, ratio_cap=1.4, **{"kl_importance_correction": False} | options)


def trl_trainer(settings: LossSettings, *, accumulation: int, per_generation: int, quantile: float) -> Any:
    """A trainer with the attributes that the loss reads."""
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    attributes = {
        "loss_type": "grpo" if settings.loss == "gspo" else settings.loss,
        "importance_sampling_level": settings.level,
        "epsilon_low": settings.clip_range,
        "epsilon_high": settings.ratio_cap if settings.loss == "cispo" else settings.upper_clip_range,
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
            sapo_temperature_pos=settings.sapo_temperature_pos,
            sapo_temperature_neg=settings.sapo_temperature_neg,
            vespo_k_pos=settings.vespo_k_pos,
            vespo_lambda_pos=settings.vespo_lambda_pos,
            vespo_k_neg=settings.vespo_k_neg,
            vespo_lambda_neg=settings.vespo_lambda_neg,
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
    **attributes: Any,
) -> TrlLoss:
    """TRL's loss and gradients, accumulated over microbatches; it has no old log-probs on the first step.

    `attributes` take the place of those that the settings stand for.
    """
    parts = split or [range(len(inputs.loss_mask))]
    steps = len(parts)
    trainer = trl_trainer(settings, accumulation=steps, per_generation=per_generation or steps, quantile=quantile)
    vars(trainer).update(attributes)
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
