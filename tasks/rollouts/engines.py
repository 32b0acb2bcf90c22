"""Who samples a plan: the policy in memory, or vLLM servers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from configs.placement import PlacementSection
from configs.rollouts import RolloutSection, TextRolloutSection
from configs.sections import PolicySection
from grpo_core.policies.engines.settings import EngineName, EngineRecord, Progress
from grpo_core.policies.protocol import Policy
from tasks.execution.resources import resource
from tasks.execution.stage import Arguments
from tasks.models.resident import ModelSpec, ResidentPolicy
from tasks.storage.artifacts.reference import PolicyRef

VLLM = "tasks.rollouts.vllm"


@dataclass(frozen=True)
class Sampler:
    """A policy that samples by itself or through an engine, and the record of who samples.

    An engine gets all prompts of a stage `at_once`, and schedules them itself.
    """

    policy: Policy
    record: EngineRecord
    at_once: bool

    @property
    def columns(self) -> dict[str, Any]:
        """What every stored row says about who sampled it."""
        return asdict(self.record)


def engine_of(rollout: RolloutSection) -> EngineName:
    """Return who samples; images are sampled by the policy itself."""
    return rollout.engine if isinstance(rollout, TextRolloutSection) else "policy"


def engine_modules(rollout: RolloutSection) -> tuple[str, ...]:
    """Return the modules of the engine, which are imported by name: no other run's results depend on their code."""
    return (VLLM,) if engine_of(rollout) == "vllm" else ()


def uses_resident_policy(arguments: Arguments) -> bool:
    """Return whether the stage with these arguments computes with the policy's weights in its own process."""
    return arguments["with_reference"] or engine_of(arguments["rollout"]) != "vllm"


def computing_dtype(policy: PolicySection) -> str:
    """Return the dtype of the policy's matrix products."""
    quantized = policy.quantization and policy.quantization.compute_dtype
    return policy.autocast or quantized or policy.dtype


@contextmanager
def opened_sampler(
    policy: PolicyRef,
    model: ModelSpec,
    rollout: RolloutSection,
    placement: PlacementSection,
    *,
    with_reference: bool,
    on_progress: Progress,
) -> Iterator[Sampler]:
    """Give what samples with a version of the policy.

    `with_reference`: log-probs of the policy and its reference are computed too, so that weights are needed.
    `on_progress` is called with the number of rows that an engine has sampled.

    Raises:
        InputError: an engine cannot sample with this version.
        ServiceError: servers do not answer.
    """
    if engine_of(rollout) == "vllm":
        weights = resource(ResidentPolicy).at(policy, model, rollout, placement) if with_reference else None
        with import_module(VLLM).sampling(policy, model, rollout, weights, on_progress) as (sampler, record):
            yield Sampler(sampler, record, at_once=True)
        return
    resident = resource(ResidentPolicy).at(policy, model, rollout, placement)
    yield Sampler(resident, EngineRecord(engine_dtype=computing_dtype(model.section)), at_once=False)
