"""Which model a run trains, and the policy that a process keeps in memory between stages."""

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from configs.placement import PlacementSection
from configs.sections import PolicySection
from grpo_core.errors import InputError
from grpo_core.policies.protocol import Policy, PolicyFamily, policy_family
from grpo_core.policies.trained.settings import Reference
from grpo_core.policies.trial import try_policy
from grpo_core.rollouts.streams import Stream
from tasks.models.devices import configure_torch
from tasks.models.initial import (
    OPTIMIZER_FILE,
    component_folder,
    copy_folder,
    forget_hub,
    initial_digest,
    local_source,
    training_choices,
    weights_folder,
)
from tasks.progress import log
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore, current_store


class ModelSpec(BaseModel):
    """Which model is trained, and how."""

    model_config = ConfigDict(frozen=True)

    section: PolicySection
    digest: str  # digest of the model's files, and of the adapter that training starts from
    adapter_seed: int  # seed of the adapters' random initialisation
    # Where each component's reference is kept when every weight is trained; `none` where none is needed.
    references: Mapping[Stream, Reference]
    # Checkpoint of the run that training starts from; None without one, for a folder and a hub name.
    adapter: ArtifactRef | None = None
    # Bytes that a GPU needs by the estimate if nothing is offloaded, and an update of denoising goes back step by step
    # where it may choose; with the whole window at once, and then with components offloaded. None: not estimated.
    memory: int | None = None
    of_window: tuple[int, int] | None = None
    # Of rewards with device auto; cpu: the policy is on the CPU, or its GPU has no room for them.
    reward_device: Literal["auto", "cpu"] = "auto"

    def offloads(self, device: torch.device) -> bool:
        """Return whether components that are not in use are kept off this device."""
        offload = self.section.offload
        if offload != "auto" or device.type != "cuda" or self.memory is None:
            return offload == "components"
        return self.memory > torch.cuda.get_device_properties(device).total_memory

    def steps_one_by_one(self, device: torch.device) -> bool:
        """Return whether an update that may choose needs a backward pass for each denoising step on this device."""
        if device.type != "cuda" or self.of_window is None:
            return False
        return self.of_window[self.offloads(device)] > torch.cuda.get_device_properties(device).total_memory

    @property
    def family(self) -> PolicyFamily:
        """The kind of policy."""
        return policy_family(self.section.kind)


@dataclass
class _Loaded:
    """A policy in memory, and which version its weights are."""

    spec: ModelSpec
    device: torch.device
    policy: Policy
    digest: str | None  # None while an update changes the weights
    reference_digest: str | None  # None: the initial model
    optimizers: "_Optimizers | None" = None


@dataclass
class _Optimizers:
    """The optimizers of components as an update left them, of types that rollouts need not depend on."""

    checkpoint: str  # digest of what the update wrote
    updates: Mapping[Stream, Any]
    by_stream: Mapping[Stream, Any]


_CHANGING = "a reference that is being refreshed"


class ResidentPolicy:
    """The policy that a process keeps in memory: loaded once, then only changed weights are read."""

    def __init__(self) -> None:
        self._loaded: _Loaded | None = None

    def at(self, reference: PolicyRef, spec: ModelSpec, settings: Any, placement: PlacementSection) -> Policy:
        """Return the policy with a version's weights, loaded if need be; InputError if its files are not the run's."""
        device = configure_torch(placement)
        if self._loaded is None or (self._loaded.spec, self._loaded.device) != (spec, device):
            self._loaded = None  # frees its memory for the next one
            begun = time.perf_counter()
            _require_same_model(spec)
            self._loaded = _Loaded(spec, device, load_policy(spec, settings, device), spec.digest, None)
            log(f"loaded {spec.section.model} in {time.perf_counter() - begun:.1f} s")
        _load_changes(self._loaded, reference)
        self._loaded.policy.sample_with(settings)
        return self._loaded.policy

    def begin_update(self, version: PolicyRef, updates: Mapping[Stream, Any]) -> Mapping[Stream, Any]:
        """Mark the weights as those of no version, until `commit_weights`.

        Returns the optimizers of the update that made this version, if it had the same settings and they are in memory.
        They are returned once: an update that fails leaves their state changed.
        """
        if self._loaded is None:
            return {}
        kept, self._loaded.optimizers = self._loaded.optimizers, None
        self._loaded.digest = None
        # Version 0 begins with new optimizers, even if another run's checkpoint has its weights.
        written = version.checkpoint.digest if version.checkpoint is not None and version.version else None
        return kept.by_stream if kept is not None and (kept.checkpoint, kept.updates) == (written, updates) else {}

    def keeps_optimizers(self, updates: Mapping[Stream, Any]) -> bool:
        """Return whether optimizers are kept until the next update: those in CPU memory are."""
        if self._loaded is None:
            return False
        return self._loaded.device.type == "cpu" or all(each.offload_optimizer for each in updates.values())

    def keep_optimizers(self, checkpoint: str, updates: Mapping[Stream, Any], optimizers: Mapping[Stream, Any]) -> None:
        """Keep the optimizers that wrote a checkpoint until the next update."""
        if self._loaded is not None:
            self._loaded.optimizers = _Optimizers(checkpoint, updates, optimizers)

    def begin_reference_refresh(self) -> None:
        """Mark the reference's weights as those of no version, until `commit_weights`."""
        if self._loaded is not None:
            self._loaded.reference_digest = _CHANGING

    def commit_weights(self, digest: str, reference_digest: str | None) -> None:
        """Name the version that the update has made of the weights in memory."""
        if self._loaded is not None:
            self._loaded.digest, self._loaded.reference_digest = digest, reference_digest

    def close(self) -> None:
        """Free the policy's memory; `at` loads it again."""
        self._loaded = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _require_same_model(spec: ModelSpec) -> None:
    """Refuse a folder or cache of this machine that has another model or adapter under the same name."""
    found = initial_digest(spec.section, _adapter_store(spec), spec.adapter)
    if found != spec.digest:
        # The hub's branch may have moved since this process asked.
        forget_hub()
        found = initial_digest(spec.section, _adapter_store(spec), spec.adapter)
    if found != spec.digest:
        hint = f"Its files here are {found[:12]}, the run's {spec.digest[:12]}; put the same files on every machine."
        raise InputError("policy.model", spec.section.model, hint)


def _adapter_store(spec: ModelSpec) -> ArtifactStore | None:
    """Return the store of the adapter that training starts from; a model without a run needs none."""
    return None if spec.adapter is None else current_store()


def load_policy(spec: ModelSpec, settings: Any, device: torch.device) -> Policy:
    """Load a policy with its initial weights, and try it; InputError if it cannot be trained."""
    begun = time.perf_counter()
    policy = load_untried(spec, settings, device)
    try:
        trial = try_policy(spec.section.kind, spec.section.model, policy)
    except InputError as error:
        found = (
            f"Found {time.perf_counter() - begun:.0f} s after it began to load; `grpo doctor --load` finds it before."
        )
        raise InputError(error.place, error.value, f"{error.hint} {found}") from error
    if trial is not None and trial.prompts:
        log(f"in an update {trial.prompts}")
    return policy


def load_untried(spec: ModelSpec, settings: Any, device: torch.device) -> Policy:
    """Load a policy with its initial weights; on the meta device without any."""
    section, seed = spec.section, spec.adapter_seed
    store = _adapter_store(spec)
    with training_choices(section, store, spec.adapter, references=spec.references, seed=seed) as choices:
        return spec.family.policy_class().load(
            local_source(section.model, section.revision),
            settings,
            choices,
            dtype=getattr(torch, section.dtype),
            device=device,
            autocast=None if section.autocast is None else getattr(torch, section.autocast),
            attn_implementation=section.attn_implementation,
            offload=spec.offloads(device),
        )


def _load_changes(loaded: _Loaded, version: PolicyRef) -> None:
    """Read the weights of a version that differ from those in memory."""
    new_weights = loaded.digest != version.digest
    new_reference = loaded.reference_digest != version.copies.get("reference")
    if not new_weights and not new_reference:
        return
    if new_weights:
        loaded.digest = None
    if new_reference:
        loaded.reference_digest = _CHANGING
    checkpoint = version.checkpoint
    # What an update alone needs, the optimizer's moments, is twice as large as the weights.
    with current_store().reading(without=(f"*/{OPTIMIZER_FILE}",)) as read:
        folder = None if checkpoint is None else read(checkpoint)
        for stream, component in loaded.policy.components.items():
            if new_weights:
                component.load_weights(folder and weights_folder(folder, version, stream))
            if new_reference:
                reference = folder and copy_folder(component_folder(folder, stream), "reference")
                # Another component's reference may have changed, and this one keeps none.
                if reference is not None or component.trained.has_reference:
                    component.trained.load_reference(reference)
    loaded.digest, loaded.reference_digest = version.digest, version.copies.get("reference")
