"""Rollouts of the tiny GLM-Image with tokens and noisy denoising steps, and hand-made ones with states of any dtype."""

from collections.abc import Mapping, Sequence

import torch
from PIL import Image
from torch import Tensor

from configs.placement import PlacementSection
from configs.rollouts import GlmImageRolloutSection
from grpo_core.collect import collect_rollouts
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.records import GroupRequest, RolloutGroup, SampledActions
from grpo_core.rollouts.streams import ImageSize
from tasks.execution.resources import resource
from tasks.models.resident import ResidentPolicy
from tasks.prompts.curriculum import DrawnPrompt
from tasks.prompts.read import Prompt
from tasks.rollouts.collect_rollouts import collect_rollouts_task
from tasks.rollouts.plan import RolloutPlan
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tests.tasks.stage_calls import round_of
from tests.tasks.update.update_jobs import JOINT

ROLLOUT = GlmImageRolloutSection(
    height=32, width=32, num_inference_steps=3, guidance_scale=1.0, sde_window_range=(0, 2), prompts_per_batch=1
)
PLACEMENT = PlacementSection(devices="cpu")
UNEVEN = (2, 1, 1)
WINDOW = 2


def policy() -> PolicyRef:
    return PolicyRef(version=0, digest=JOINT.spec().digest)


def plan(
    *, images_of_samples: Sequence[int] = UNEVEN, window_start: int | None = 0, prompts: int = 2, iteration: int = 1
) -> RolloutPlan:
    texts = ("a red circle", "a blue cross", "a green square")[:prompts]
    return round_of(
        [DrawnPrompt("default", Prompt(f"id{place}", text, {}), None) for place, text in enumerate(texts)],
        iteration=iteration,
        images_of_samples=images_of_samples,
        shared_noise=False,
        window_start=window_start,
    )


def collect(planned: RolloutPlan) -> ArtifactRef:
    return collect_rollouts_task.fn(policy(), planned, JOINT.spec(), ROLLOUT, False, PLACEMENT)


def sampled(planned: RolloutPlan) -> list[RolloutGroup]:
    sampler = resource(ResidentPolicy).at(policy(), JOINT.spec(), ROLLOUT, PLACEMENT)
    return list(collect_rollouts(sampler, [planned.request(group) for group in planned.groups], prompts_per_batch=1))


def random_states(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(WINDOW + 1, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made_group(request: GroupRequest, states: Mapping[str, Tensor]) -> RolloutGroup:
    """A group of one-pixel images with these states, made without tokens."""
    rows = len(request.sample_ids)
    steps = DenoisingBatch(
        prompts=(request.prompt,) * rows,
        states=tuple(states[sample_id] for sample_id in request.sample_ids),
        first_steps=(request.window_start or 0,) * rows,
        sizes=(ImageSize(1, 1),) * rows,
    )
    logprobs = torch.arange(rows * WINDOW).view(rows, WINDOW) / -7
    actions = SampledActions(steps, logprobs, finished=torch.ones(rows, dtype=torch.bool), max_length=WINDOW)
    return RolloutGroup(request, {"denoising": actions}, (Image.new("RGB", (1, 1)),) * rows)
