"""The policy that this process holds. It is loaded once; afterwards only what an update changed is taken."""

import gc
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from configs.core_settings import training_choice
from configs.placement_sections import PlacementSection
from configs.schema import PolicySection
from grpo_core.errors import InputError
from grpo_core.policies.family import PolicyFamily, policy_family
from grpo_core.policies.protocol import Policy
from grpo_core.policies.trained import Reference, TrainingChoice
from tasks.models.files import REFERENCE_FOLDER, model_digest
from tasks.progress import log
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import current_store


class ModelSpec(BaseModel):
    """Which model is trained, and how.

    Attributes:
        section: the configuration's policy section.
        digest: of the model's files.
        adapter_seed: of the adapters' random half.
        reference: where the reference is kept when every weight is trained; `none` where nothing asks for it.
    """

    model_config = ConfigDict(frozen=True)

    section: PolicySection
    digest: str
    adapter_seed: int
    reference: Reference

    @property
    def family(self) -> PolicyFamily:
        """The kind of policy that it is."""
        return policy_family(self.section.kind)

    def choice(self) -> TrainingChoice:
        """What of the model is trained."""
        return training_choice(self.section, reference=self.reference, seed=self.adapter_seed)


@dataclass
class ResidentPolicy:
    """The policy in memory, and what it was loaded from."""

    spec: ModelSpec
    device: torch.device
    policy: Policy
    digest: str | None  # None while its weights are in between two versions
    reference_digest: str | None


_held: ResidentPolicy | None = None
# Of a reference None is the model as it was given.
_IN_BETWEEN = "in between two references"


def configure_torch(placement: PlacementSection) -> torch.device:
    """Set the thread count, the one place where it is chosen, and name the device."""
    torch.set_num_threads(placement.torch_threads)
    return torch_device(placement)


def torch_device(placement: PlacementSection) -> torch.device:
    """The device that the placement stands for on this machine."""
    if placement.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(placement.device)


def policy_at(reference: PolicyRef, spec: ModelSpec, settings: Any, placement: PlacementSection) -> Policy:
    """The policy at this version, sampling and scoring with these settings."""
    global _held
    device = configure_torch(placement)
    if _held is None or (_held.spec, _held.device) != (spec, device):
        _held = None  # the previous model's memory is needed for this one
        begun = time.perf_counter()
        _require_same_model(spec)
        _held = ResidentPolicy(spec, device, _load(spec, settings, device), spec.digest, None)
        log(f"loaded {spec.section.model} in {time.perf_counter() - begun:.1f} s")
    if (_held.digest, _held.reference_digest) != (reference.digest, reference.reference_digest):
        _take_weights(_held, reference)
    _held.policy.sample_with(settings)
    return _held.policy


def _require_same_model(spec: ModelSpec) -> None:
    """The folder or cache of this machine may hold another model under the same name."""
    found = model_digest(spec.section.model)
    if found != spec.digest:
        hint = (
            f"Its files here are {found[:12]} and the run's are {spec.digest[:12]}; put the same files there on every "
            "machine that does its stages."
        )
        raise InputError("policy.model", spec.section.model, hint)


def _load(spec: ModelSpec, settings: Any, device: torch.device) -> Policy:
    section = spec.section
    return spec.family.load(
        section.model,
        settings,
        spec.choice(),
        dtype=getattr(torch, section.dtype),
        device=device,
        autocast=None if section.autocast is None else getattr(torch, section.autocast),
    )


def _take_weights(held: ResidentPolicy, reference: PolicyRef) -> None:
    """What differs between the weights held and this version's is read and taken."""
    checkpoint = reference.checkpoint
    other_weights, other_reference = (
        held.digest != reference.digest,
        held.reference_digest != reference.reference_digest,
    )
    if other_weights:
        held.digest = None
    if other_reference:
        held.reference_digest = _IN_BETWEEN
    with tempfile.TemporaryDirectory() as fetched:
        folder = None if checkpoint is None else current_store().local_files(checkpoint, Path(fetched) / "policy")
        if other_weights:
            held.policy.load_weights(folder)
        if other_reference:
            refreshed = folder is not None and reference.reference_digest is not None
            held.policy.load_reference(folder / REFERENCE_FOLDER if refreshed and folder else None)
    held.digest, held.reference_digest = reference.digest, reference.reference_digest


def begin_update() -> None:
    """An update begins: until it names the version it made, the weights held are no version at all."""
    if _held is not None:
        _held.digest = None


def reference_in_between() -> None:
    """The reference begins to change: until the update names what it made of it, the one held is none at all."""
    if _held is not None:
        _held.reference_digest = _IN_BETWEEN


def commit_weights(digest: str, reference_digest: str | None) -> None:
    """The update is over: the weights held are this version's."""
    if _held is not None:
        _held.digest, _held.reference_digest = digest, reference_digest


def release_policy() -> None:
    """Give up the policy held and its memory; the next `policy_at` loads it again."""
    global _held
    _held = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
