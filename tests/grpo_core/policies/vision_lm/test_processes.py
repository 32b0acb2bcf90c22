"""Processes that share the weights, of which one sees images, another more of them or none."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.policies.vision_lm.policy import VisionLMPolicy
from grpo_core.update.distributed import ShardedProcessGroup
from tests.grpo_core.policies.vision_lm.tiny_families import KINDS, drawn, make_policy
from tests.processes import in_processes

CHOICES = {
    "all": TrainingChoice(None, freeze_vision=False),
    "adapters": TrainingChoice(LoraSettings(rank=2, alpha=4.0)),
}


def add_up(policy: VisionLMPolicy, kind: str, rows: tuple[int, ...], group: ShardedProcessGroup | None) -> None:
    """Add up the gradients of these rows, one a pass, on weights that the group has shared out."""
    actions = drawn(policy, kind, group_size=1).actions
    # What was sampled elsewhere: no features are kept.
    policy._prompts.clear()
    if group is not None:
        group.distribute(policy.trained)
    policy.prepare_for_update(actions)
    for row in rows:
        policy.logprobs(actions.select([row])).logprobs.sum().backward()


def gradients(policy: VisionLMPolicy) -> dict[str, Tensor]:
    found = {name: each.grad for name, each in policy.trainable_parameters().items() if each.grad is not None}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def in_shares(folder: Path, kinds: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    group = ShardedProcessGroup(torch.device("cpu"))
    for kind in kinds:
        for name, choice in CHOICES.items():
            policy = make_policy(kind, choice=choice)
            # Two images and one; then none and one.
            add_up(policy, kind, ((1, -1), (0, 2))[group.rank], group)
            parameters = policy.trainable_parameters().values()
            assert any(isinstance(each, DTensor) for each in parameters), "nothing is shared out"
            group.add_gradients(parameters)
            summed = gradients(policy)
            if group.rank == 0:
                torch.save(summed, folder / f"{kind}-{name}.pt")


@pytest.mark.slow
def test_each_process_sees_its_own_images(tmp_path: Path) -> None:
    in_processes(2, in_shares, tmp_path, KINDS)
    for kind in KINDS:
        for name, choice in CHOICES.items():
            policy = make_policy(kind, choice=choice)
            add_up(policy, kind, (1, -1, 0, 2), None)
            alone, shared = gradients(policy), torch.load(tmp_path / f"{kind}-{name}.pt")
            assert shared.keys() == alone.keys()
            for each, gradient in alone.items():
                scale = float(gradient.abs().max())
                torch.testing.assert_close(shared[each], gradient, rtol=1e-3, atol=1e-4 * max(scale, 1e-2), msg=each)
