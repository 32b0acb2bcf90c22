"""Who samples a plan: the policy in memory, or vLLM servers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

from configs.placement import PlacementSection
from configs.rollouts import RolloutSection, TextRolloutSection
from grpo_core.policies.engines.settings import EngineName, EngineRecord, Progress
from grpo_core.policies.protocol import Policy
from tasks.execution.resources import resource
from tasks.execution.stage import Arguments
from tasks.models.resident import ModelSpec, ResidentPolicy
from tasks.storage.artifacts.reference import PolicyRef

VLLM = "tasks.rollouts.vllm"


@dataclass(frozen=True)
class Sampler:
    """A policy that samples by itself or through an engine, which gets all prompts `at_once`, and who samples."""

    policy: Policy
    record: EngineRecord
    at_once: bool


def engine_of(rollout: RolloutSection) -> EngineName:
    """Return who samples; images are sampled by the policy itself."""
    return rollout.engine if isinstance(rollout, TextRolloutSection) else "policy"


def engine_modules(rollout: RolloutSection) -> tuple[str, ...]:
    """Return the modules of the engine, which are imported by name: no other run's results depend on their code."""
    return (VLLM,) if engine_of(rollout) == "vllm" else ()


def uses_resident_policy(arguments: Arguments) -> bool:
    """Return whether the stage with these arguments computes with the policy's weights in its own process."""
    return arguments["with_reference"] or engine_of(arguments["rollout"]) != "vllm"


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
    """Give what samples with a version of the policy; `on_progress` is called with the rows of an engine.

    Weights are needed `with_reference`, for log-probs of the policy and its reference. InputError if an engine cannot
    sample with this version, ServiceError if servers do not answer.
    """
    if engine_of(rollout) == "vllm":
        weights = resource(ResidentPolicy).at(policy, model, rollout, placement) if with_reference else None
        with import_module(VLLM).sampling(policy, model, rollout, weights, on_progress) as (sampler, record):
            yield Sampler(sampler, record, at_once=True)
        return
    resident = resource(ResidentPolicy).at(policy, model, rollout, placement)
    section = model.section
    # The dtype of its matrix products.
    dtype = section.autocast or (section.quantization and section.quantization.compute_dtype) or section.dtype
    yield Sampler(resident, EngineRecord(engine_dtype=dtype), at_once=False)
