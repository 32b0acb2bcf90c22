"""`grpo doctor --load`: the model is loaded as a run does and tried, and what it takes is put beside the estimate."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from configs.schema import RunConfig
from flows.preflight.measured import ComponentParity, Measured, measure_run
from flows.preflight.model import estimate_model, source_of, trained_model, with_memory
from flows.preflight.prompts import PromptFiles
from grpo_core.errors import InputError
from grpo_core.policies.estimate import GIB, PHASES
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.sizes import Phase
from grpo_core.policies.trial import try_policy
from tasks.models.devices import configure_torch
from tasks.models.initial import training_choices
from tasks.models.resident import ModelSpec, load_untried
from tasks.reports.report import Table
from tasks.storage.artifacts.store import open_store, use_store


@dataclass(frozen=True)
class PhaseRow:
    """What a phase took, and what it should by the estimate; memory in bytes, without the CUDA context."""

    phase: Phase
    seconds: float
    allocated: int | None
    estimated: int | None


@dataclass(frozen=True)
class LoadedTrial:
    """A sentence about loading and trying, the phases, and the parity of each stream."""

    message: str
    phases: tuple[PhaseRow, ...]
    parity: tuple[ComponentParity, ...]

    @property
    def table(self) -> Table:
        """The phases, for people."""
        rows = []
        for each in self.phases:
            row = {"phase": PHASES[each.phase], "seconds": f"{each.seconds:.3g}"}
            if each.allocated is not None and each.estimated is not None:
                row |= {"GiB": f"{each.allocated / GIB:.2f}", "estimated": f"{each.estimated / GIB:.2f}"}
            rows.append(row)
        return Table("a little of a run, measured", rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """The parity of each stream, for people."""
        return tuple(
            f"parity of {each.stream}: at most {each.most:.2g} nats (allowed {each.allowed.max_difference:.2g}), "
            f"{each.mean:.2g} on average (allowed {each.allowed.mean_difference:.2g})"
            for each in self.parity
        )


def try_loaded(config: RunConfig, prompts: PromptFiles) -> LoadedTrial:
    """Load the model as a run does, try it, and measure; InputError if it cannot be trained here."""
    spec, device = with_memory(config, trained_model(config)), configure_torch(config.placement)
    use_store(open_store(config.storage, config.run.name))
    begun = time.perf_counter()
    policy = load_untried(spec, config.rollout, device)
    said = [f"loaded in {time.perf_counter() - begun:.1f} s"]
    if (trial := try_policy(config.policy.kind, config.policy.model, policy)) is not None:
        said.append(f"tried in {trial.seconds:.1f} s, log-probs within {trial.difference:.2g} nats")
        said += [trial.prompts] if trial.prompts else []
    if device.type == "cuda":
        said.append(f"on {torch.cuda.get_device_name(device)}")
    measured = measure_run(config, prompts, policy, device)
    for each in measured.parity:
        if each.most > each.allowed.max_difference or each.mean > each.allowed.mean_difference:
            hint = f"Log-probs of {each.stream}, computed again, differ by {each.most:.2g} nats at most and "
            hint += f"{each.mean:.2g} on average; the gate allows {each.allowed.max_difference:.2g} and "
            hint += f"{each.allowed.mean_difference:.2g}: docs/is_it_learning.md."
            raise InputError(f"{config.update_path(each.stream)}.parity", each.most, hint)
    estimated = _estimated(config, spec, measured) if measured.costs.peaks else {}
    phases = tuple(
        PhaseRow(phase, seconds, measured.costs.peaks.get(phase), estimated.get(phase))
        for phase, seconds in measured.costs.seconds.items()
    )
    return LoadedTrial(", ".join(said), phases, measured.parity)


def _estimated(config: RunConfig, spec: ModelSpec, measured: Measured) -> Mapping[Phase, int]:
    """Return the bytes of each phase of what was measured, without the CUDA context."""
    family, drawn = policy_family(config.policy.kind), measured.prompts
    sources = [[source.size for source in each.prompt.sources] for each in drawn]
    texts, images = [each.prompt.text for each in drawn], sources if any(sources) else ()
    longest = family.refuse_prompts(source_of(config), config.rollout, texts, images)
    sizes = tuple({each.size for each in drawn if each.size is not None})
    store = open_store(config.storage, config.run.name) if spec.adapter else None
    offload, short = spec.offloads(measured.costs.device), config.model_copy(update={"rollout": measured.rollout})
    with training_choices(config.policy, store, spec.adapter, references=config.references) as choices:
        sampled, trained = (
            estimate_model(each, choices, sizes, offload=offload, longest=longest).memory for each in (short, config)
        )
    found: dict[Phase, int] = {}
    for phase in sampled.phases:
        memory = trained if phase.endswith("update") else sampled
        found[phase] = memory.in_phase(phase) - GIB
    if "encoding" in found:
        # Prompts are encoded while images are made.
        found["decoding"] = max(found["decoding"], found.pop("encoding"))
    return found
