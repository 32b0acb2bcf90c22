"""The policy that this process holds. It is loaded once; afterwards only what an update changed is taken."""

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from configs.schema import PlacementSection, PolicySection
from grpo_core.policies.adapters import LoraSettings
from grpo_core.policies.glm_image.policy import LANGUAGE_MODEL_LINEARS, GlmImagePolicy, GlmImageSettings, TrainingChoice
from tasks.model_files import add_file
from tasks.storage.reference import PolicyRef
from tasks.storage.store import current_store

WEIGHT_FILES = ("adapter_model*.safetensors", "model*.safetensors")


class ModelSpec(BaseModel):
    """Which model is trained, and how.

    Attributes:
        section: the configuration's policy section.
        digest: of the model's files.
        adapter_seed: of the adapters' random half.
        keep_reference: a reference is needed, for the KL.
    """

    model_config = ConfigDict(frozen=True)

    section: PolicySection
    digest: str
    adapter_seed: int
    keep_reference: bool

    def lora(self) -> LoraSettings | None:
        """The adapters' settings; None when every weight is trained."""
        if self.section.lora is None:
            return None
        lora = self.section.lora
        return LoraSettings(lora.rank, lora.alpha, lora.targets or LANGUAGE_MODEL_LINEARS)


@dataclass
class _Held:
    spec: ModelSpec
    device: torch.device
    policy: GlmImagePolicy
    digest: str | None  # None while its weights are in between two versions


_held: _Held | None = None


def configure_torch(placement: PlacementSection) -> torch.device:
    """Set the thread count, the one place where it is chosen, and name the device."""
    torch.set_num_threads(placement.torch_threads)
    if placement.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(placement.device)


def policy_at(
    reference: PolicyRef, spec: ModelSpec, drawing: GlmImageSettings, placement: PlacementSection
) -> GlmImagePolicy:
    """The policy at this version, drawing with these settings."""
    global _held
    device = configure_torch(placement)
    if _held is None or (_held.spec, _held.device) != (spec, device):
        _held = None  # the former model's memory is needed for this one
        choice = TrainingChoice(
            lora=spec.lora(),
            keep_reference=spec.keep_reference,
            gradient_checkpointing=spec.section.gradient_checkpointing,
            seed=spec.adapter_seed,
        )
        dtype: torch.dtype = getattr(torch, spec.section.dtype)
        policy = GlmImagePolicy.load(spec.section.model, drawing, choice, dtype=dtype, device=device)
        _held = _Held(spec, device, policy, spec.digest)
    if _held.digest != reference.digest:
        _held.digest = None
        with tempfile.TemporaryDirectory() as fetched:
            checkpoint = reference.checkpoint
            folder = None if checkpoint is None else current_store().local_files(checkpoint, Path(fetched) / "policy")
            _held.policy.load_weights(folder)
        _held.digest = reference.digest
    _held.policy.draw_with(drawing)
    return _held.policy


def weights_in_between() -> None:
    """An update begins: until it names the version it made, the weights held are no version at all."""
    if _held is not None:
        _held.digest = None


def weights_became(digest: str) -> None:
    """The update is over: the weights held are this version's."""
    if _held is not None:
        _held.digest = digest


def weights_digest(folder: Path) -> str:
    """sha256 over the weight files of a policy's folder."""
    digest = hashlib.sha256()
    for pattern in WEIGHT_FILES:
        for path in sorted(folder.glob(pattern)):
            add_file(digest, path.name, path)
    return digest.hexdigest()
