"""What a loaded policy takes on its device: a little is sampled, scored and trained on, and nothing is stored."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from configs.schema import RunConfig
from flows.preflight.prompts import PromptFiles
from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.errors import InputError
from grpo_core.parity import ParityTolerance, measure_parity
from grpo_core.policies.estimate import PHASES
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.sizes import Phase
from grpo_core.rollouts.actions import TokenBatch
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.ragged import RaggedRows
from grpo_core.rollouts.records import GroupRequest, RolloutGroup, TrainingRows
from grpo_core.rollouts.streams import Modality, Stream
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.step import UpdateResult
from grpo_core.update.velocity_settings import VelocitySettings
from grpo_core.update.velocity_update import update_by_velocity
from tasks.prompts.curriculum import DrawnPrompt
from tasks.rollouts.plan import plan_round
from tasks.update.rows import parity_tolerance

UNLIMITED = ParityTolerance(math.inf, math.inf)
_TOKENS = 4
_LOWERED: Mapping[Phase, str] = {
    "sampling": "rollout.prompts_per_batch",
    "decoding": "rollout.decode_batch_size",
    "tokens update": "update.micro_batch_size",
    "denoising update": "update.micro_batch_size",
}
_UPDATES: Mapping[Stream, Phase] = {"tokens": "tokens update", "denoising": "denoising update"}


class PhaseCosts:
    """What phases take on a device.

    Attributes:
        seconds: without those of a phase inside it.
        peaks: the most bytes that PyTorch's allocator held; none on a CPU, where it does not count them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds, self.peaks = dict[Phase, float](), dict[Phase, int]()
        self._measured = 0.0

    def during(self, phase: Phase, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Do the work, and measure it as this phase; InputError names what to lower where memory is too small."""
        self._begin()
        before, begun = self._measured, time.perf_counter()
        try:
            result = work(*arguments, **options)
        except torch.OutOfMemoryError as error:
            hint = f"The device's memory is too small ({PHASES[phase]}). Lower it: docs/first_gpu.md."
            raise InputError(_LOWERED[phase], str(error).partition(". ")[0], hint) from error
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
        whole = time.perf_counter() - begun
        self.seconds[phase] = whole - (self._measured - before)
        self._measured = before + whole
        if on_gpu:
            self.peaks[phase] = torch.cuda.max_memory_allocated(self.device)
        self._begin()
        return result

    def _begin(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)


def measure_rollouts(
    costs: PhaseCosts, policy: Any, requests: Sequence[GroupRequest], modality: Modality
) -> list[RolloutGroup]:
    """Sample groups in one batch; where tokens are rendered to images, each is a phase of its own."""
    collect = partial(collect_rollouts, policy, requests, prompts_per_batch=len(requests))
    if modality == "text":
        groups: list[RolloutGroup] = costs.during("sampling", lambda: list(collect()))
        return groups
    tokens = getattr(policy, "tokens", None)
    if tokens is not None:
        tokens.sample = partial(costs.during, "sampling", tokens.sample)
    try:
        rendered: list[RolloutGroup] = costs.during("decoding", lambda: list(collect()))
    finally:
        if tokens is not None:
            del tokens.sample
    return rendered


def measure_update(
    costs: PhaseCosts,
    component: Any,
    rows: TrainingRows,
    settings: Any,
    *,
    first: Callable[[Callable[[], UpdateResult]], UpdateResult] = lambda update: update(),
) -> UpdateResult:
    """Update twice on these rows in one minibatch, with a learning rate of 0, so that weights stay as they are.

    Seconds and memory are those of the second, which has the optimizer's moments, the result is that of the `first`.
    """
    once = settings.model_copy(
        update={"learning_rate": 0.0, "minibatch_size": len(rows), "minibatches": None, "epochs": 1}
    )
    kept = {"ema": settings.ema is not None, "old": settings.old_policy_decay(1) > 0}
    names = [name for name, is_kept in kept.items() if is_kept]
    for name in names:
        component.trained.keep(name)
    optimizer = PolicyOptimizer(component.trainable_parameters(), once)
    by_velocity = isinstance(once, VelocitySettings)
    train: Any = update_by_velocity if by_velocity else partial(update_policy, parity=UNLIMITED)
    update = partial(train, component, optimizer, rows, once, seed=0)
    phase = _UPDATES[rows.actions.stream]
    result: UpdateResult = costs.during(phase, first, update)
    costs.during(phase, update)
    optimizer.zero_grad()
    for name in names:
        del component.trained.copies[name]
    return result


@dataclass(frozen=True)
class ComponentParity:
    """How far log-probs of a stream, computed again, are from those while sampling, beside what the gate allows."""

    stream: Stream
    most: float
    mean: float
    allowed: ParityTolerance


@dataclass(frozen=True)
class Measured:
    """What phases took, the settings of the rollouts, and the parity of each stream with log-probs."""

    costs: PhaseCosts
    rollout: Any
    prompts: tuple[DrawnPrompt, ...]
    parity: tuple[ComponentParity, ...]


def measure_run(config: RunConfig, prompts: PromptFiles, policy: Any, device: torch.device) -> Measured:
    """Sample one batch with few tokens or steps, score it, and update each component on a microbatch.

    On a GPU rows of tokens are made as long as the run's can be, since their length decides the memory; on a CPU, where
    none is measured, one prompt is sampled.
    """
    costs, family, rollout = PhaseCosts(device), policy_family(config.policy.kind), shortened(config)
    count = config.rollout.prompts_per_batch if device.type == "cuda" else 1
    drawn = tuple(
        islice((each.drawn(place) for each in prompts.usable("data") for place in range(len(each.prompts))), count)
    )
    policy.sample_with(family.settings(rollout.model_dump()))
    short = config.model_copy(update={"rollout": rollout})
    groups = measure_rollouts(costs, policy, requests_of(short, drawn), family.modality)
    parity = []
    for stream, component in policy.components.items():
        settings = config.updates[stream]
        advantages = torch.linspace(-1, 1, len(groups[0].outputs)).repeat(len(groups), 1)
        rows = join_groups(groups, advantages, stream)
        rows = rows.select(range(min(len(rows), settings.micro_batch_size)))
        if not isinstance(settings, VelocitySettings):
            parity.append(_parity(config, component, rows, settings))
        longer = lengthened(rows, getattr(config.rollout, "max_completion_length", 0)) if costs.peaks else rows
        measure_update(costs, component, longer, settings)
    return Measured(costs, rollout, drawn, tuple(parity))


def shortened(config: RunConfig) -> Any:
    """Return the settings of rollouts with few tokens, and no more steps than the noisy ones and the last."""
    rollout = config.rollout
    window = getattr(rollout, "sde_window_size", 0) if "denoising" in config.streams else 0
    levels = [getattr(each, "timesteps_per_image", None) or 0 for each in config.updates.values()]
    shorter: dict[str, Any] = {
        "max_completion_length": _TOKENS,
        "num_inference_steps": max(2, window + 1, *levels),
        "sde_window": "first",
        "sde_window_range": (0, max(1, window)),
        "previews": None,
    }
    return rollout.model_copy(update={name: each for name, each in shorter.items() if hasattr(rollout, name)})


def requests_of(config: RunConfig, prompts: Sequence[DrawnPrompt]) -> list[GroupRequest]:
    """Return what an iteration would sample for these prompts."""
    plan = plan_round(
        prompts,
        seed=config.run.seed,
        iteration=1,
        sampling_round=1,
        images_of_samples=config.images_of_samples,
        shared_noise=False,
        window_start=config.window_start(1),
    )
    sources = {each.digest: SourceImage.of(each.load()) for drawn in prompts for each in drawn.prompt.sources}
    return [plan.request(group, sources) for group in plan.groups]


def lengthened(rows: TrainingRows, length: int) -> TrainingRows:
    """Repeat the tokens of each row until there are at least `length`; denoising steps stay as they are."""
    actions = rows.actions
    if not isinstance(actions, TokenBatch):
        return rows
    times = max(1, -(-length // actions.token_ids.shape[1]))
    return replace(rows, actions=actions.repeated(times), rollout_logprobs=rows.rollout_logprobs.repeat(1, times))


@torch.no_grad()
def _parity(config: RunConfig, component: Any, rows: TrainingRows, settings: Any) -> ComponentParity:
    stream = rows.actions.stream
    component.prepare_for_update(rows.actions)
    scored = component.logprobs(rows.actions, entropy="none").logprobs.cpu()
    report = measure_parity(rows.sample_ids, rows.rollout_logprobs, scored, rows.actions.loss_mask, stream)
    allowed = parity_tolerance(component, RaggedRows.of(rows), settings.parity, in_fp32=config.policy.in_fp32)
    return ComponentParity(stream, report.max_difference, report.mean_difference, allowed)
