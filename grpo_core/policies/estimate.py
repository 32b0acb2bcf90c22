"""What a configuration needs of one GPU and of the disk, part by part, before anything is loaded."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

GIB = 1024**3
ERROR_MARGIN = 0.15
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Phase = Literal["always", "sampling", "decoding", "update", "backward", "optimizer step"]


@dataclass(frozen=True)
class MemoryPart:
    """One part.

    Attributes:
        name: what it is.
        phase: when it is held: always, in one phase of the rollout stage (sampling, decoding), all through the
            update stage, or in one phase of it (backward, optimizer step).
        bytes: how much.
        formula: how that comes about, in words.
    """

    name: str
    phase: Phase
    bytes: int
    formula: str


@dataclass(frozen=True)
class MemoryEstimate:
    """What a configuration needs.

    Attributes:
        parts: every part, each name once.
    """

    parts: tuple[MemoryPart, ...]

    def phase(self, phase: Phase) -> int:
        """Bytes of the parts held in this phase alone."""
        return sum(part.bytes for part in self.parts if part.phase == phase)

    def part(self, name: str) -> int:
        """Bytes of one part; 0 for one that this configuration does not have."""
        return sum(part.bytes for part in self.parts if part.name == name)

    @property
    def rollout_peak(self) -> int:
        """Bytes at the peak of the rollout stage: sampling ends before decoding begins."""
        return self.phase("always") + max(self.phase("sampling"), self.phase("decoding"))

    @property
    def update_peak(self) -> int:
        """Bytes at the peak of the update stage: activations are gone when the optimizer steps."""
        return self.phase("always") + self.phase("update") + max(self.phase("backward"), self.phase("optimizer step"))

    @property
    def needed(self) -> int:
        """Bytes that a GPU should have: the higher peak and the margin."""
        return int(max(self.rollout_peak, self.update_peak) * (1 + ERROR_MARGIN))

    def rows(self) -> list[tuple[str, float, str]]:
        """(part, GiB, formula in words) of every part, then of both peaks and of what a GPU should have."""
        parts = [(part.name, part.bytes / GIB, f"{part.formula} ({part.phase})") for part in self.parts]
        return [
            *parts,
            ("peak of the rollout stage", self.rollout_peak / GIB, "always + the larger of sampling and decoding"),
            ("peak of the update stage", self.update_peak / GIB, "always + update + the larger of its phases"),
            ("needed", self.needed / GIB, f"the higher peak + {ERROR_MARGIN:.0%} for workspaces and fragmentation"),
        ]


@dataclass(frozen=True)
class Workload:
    """What is done at once.

    Attributes:
        dtype: of the weights.
        group_size: samples a prompt.
        prompts_per_batch: prompts sampled at once.
        micro_batch_size: rows of a forward and backward pass.
        eight_bit_optimizer: the optimizer's moments take a byte each.
    """

    dtype: Literal["float32", "bfloat16"]
    group_size: int
    prompts_per_batch: int
    micro_batch_size: int
    eight_bit_optimizer: bool


@dataclass(frozen=True)
class ModelEstimate:
    """What one model needs.

    Attributes:
        memory: of one GPU.
        checkpoint: bytes of a policy version on disk, optimizer state included.
        counted: the model's parts in words.
    """

    memory: MemoryEstimate
    checkpoint: int
    counted: str


def count_parameters(module: nn.Module) -> int:
    """Elements of all parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())
