"""How far a merged model is from the policy whose adapters were trained over a quantized base."""

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from configs.sections import PolicySection
from flows.export.plan import ExportPlan
from grpo_core.actions import Actions
from grpo_core.errors import InputError
from grpo_core.policies.protocol import Policy, policy_family
from grpo_core.streams import Stream
from tasks.models.resident import ModelSpec, ResidentPolicy, configure_torch, load_policy
from tasks.runs.stored import adapter_version, read_iterations
from tasks.storage.artifacts.store import use_store
from tasks.storage.files import scratch_folder
from tasks.update.rows import read_training_rows

ROLLOUTS = 16
"""Stored rollouts whose log-probs are compared."""


class MergedDifference(BaseModel):
    """The differences of log-probs of stored actions, merged model less policy, in nats.

    Attributes:
        rollouts: number of rollouts.
        mean: of the absolute differences.
        largest: of them.
    """

    rollouts: int
    mean: float
    largest: float

    def __str__(self) -> str:
        """Say what was compared, and how far it is apart."""
        return f"{self.mean:.2g} on average and {self.largest:.2g} at most, over {self.rollouts} stored rollouts"


def measure(plan: ExportPlan, merged: Path) -> MergedDifference | None:
    """Score the first rollouts of the version's iteration with the policy and with the merged model.

    Args:
        merged: folder of the merged model.

    Returns:
        None where the iteration is not stored any more.
    """
    use_store(plan.store)
    with scratch_folder() as fetched:
        try:
            stored = _stored_actions(plan, fetched)
        except InputError:
            return None
        config, placement = plan.config, plan.config.placement
        adapter = adapter_version(config)
        references = dict.fromkeys(config.streams, "none")
        spec = ModelSpec(
            section=config.policy, digest=plan.base_digest, adapter_seed=0, references=references, adapter=adapter
        )
        resident = ResidentPolicy()
        scored = _logprobs(resident.at(plan.policy.with_copies("ema", "old"), spec, config.rollout, placement), stored)
        resident.close()
        whole = ModelSpec(
            section=_merged_section(config.policy, merged), digest="", adapter_seed=0, references=references
        )
        other = _logprobs(load_policy(whole, config.rollout, configure_torch(placement)), stored)
    apart = torch.cat([(other[stream] - scored[stream]).abs() for stream in scored])
    rollouts = max(len(actions) for actions, _ in stored.values())
    return MergedDifference(rollouts=rollouts, mean=float(apart.mean()), largest=float(apart.max()))


def _merged_section(policy: PolicySection, merged: Path) -> PolicySection:
    """Return the section of the merged model, of which nothing more is trained than its kind requires."""
    own = ("revision", "adapter", "lora", "denoising_lora", "quantization")
    return policy.model_copy(update={"model": str(merged), **dict.fromkeys(own)})


def _stored_actions(plan: ExportPlan, fetched: Path) -> dict[Stream, tuple[Actions, Tensor]]:
    """Return the first actions of each trained stream, and which of them count.

    Raises:
        InputError: they are not stored any more.
    """
    number = plan.policy.version
    (iteration,) = read_iterations(plan.store, (number, number), "stored")
    found: dict[Stream, tuple[Actions, Tensor]] = {}
    for stream in plan.config.streams:
        rows = read_training_rows(
            plan.store,
            [each.rollouts for each in iteration.rounds],
            iteration.advantages,
            plan.policy,
            policy_family(plan.config.policy.kind),
            fetched,
            stream=stream,
            max_staleness=number,
        ).rows
        first = rows.select(range(min(ROLLOUTS, len(rows))))
        found[stream] = (first.actions, first.actions.loss_mask)
    return found


@torch.no_grad()
def _logprobs(policy: Policy, stored: dict[Stream, tuple[Actions, Tensor]]) -> dict[Stream, Tensor]:
    """Return the log-probs of the actions that count, row by row, so that memory is that of one."""
    found: dict[Stream, Tensor] = {}
    for stream, (actions, mask) in stored.items():
        component: Any = policy.components[stream]
        component.prepare_for_sampling()
        rows = []
        for row in range(len(actions)):
            logprobs = component.logprobs(actions.select([row]), entropy="none").logprobs.float().cpu()
            rows.append(logprobs[0, : mask.shape[1]][mask[row]])
        found[stream] = torch.cat(rows)
    return found
