"""Estimate the GPU memory and disk space that a configuration needs, part by part, before anything is loaded.

Weights, adapters, copies, gradients, optimizer moments and a policy version's files are exact: their parameters are
counted on the model built on the meta device. What a pass computes is approximate: bytes for each position of a row,
block and unit of hidden width, taken from the tensors that autograd keeps on a CPU of SD3's, FLUX's, Qwen-Image's,
Z-Image's and GLM-Image's blocks: 69 to 131 bytes in fp32, 42 to 96 in 16 bits, where norms and adapters keep copies in
fp32. It has not been compared with a GPU; kernels' workspaces and the allocator's fragmentation are in ERROR_MARGIN.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from grpo_core.logprobs import CHUNK_TOKENS
from grpo_core.policies.denoising.rows import PIXELS_AT_ONCE
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.sizes import ComponentSizes, ModelSizes, count_parameters
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.streams import ImageSize, Stream

GIB, MIB = 1024**3, 1024**2
ERROR_MARGIN = 0.15
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP32 = 4

_KEPT_BY_BLOCK = {4: 92, 2: 78}
"""Bytes that a block keeps for its backward pass, for each position and unit of hidden width, by bytes per value."""

_MADE_BY_BLOCK = 16
"""Values that a block's forward pass has at once, for each position and unit of hidden width; a backward pass has their
gradients too."""

_SCORED_ID = 26
"""Bytes for each id that a token can be: fp32 log-probs with two gradients, entropies and a stored support."""

_STATE_BYTES = 2
"""States are stored in 16 bits."""

Phase = Literal["always", "sampling", "decoding", "update", "backward", "optimizer step"]


@dataclass(frozen=True)
class MemoryPart:
    """One part of the memory.

    Attributes:
        name: of the part.
        phase: when it is in memory: always, in one phase of the rollout stage (sampling, decoding), during all of
            the update stage, or in one phase of it (backward, optimizer step).
        bytes: its size.
        formula: how the size is computed, as text.
        exact: whether it is counted; otherwise it is estimated by a formula.
    """

    name: str
    phase: Phase
    bytes: int
    formula: str
    exact: bool = False


@dataclass(frozen=True)
class MemoryEstimate:
    """The GPU memory that a configuration needs.

    Attributes:
        parts: all of them; names are unique.
    """

    parts: tuple[MemoryPart, ...]

    def phase(self, phase: Phase) -> int:
        """Return the bytes of the parts that are in memory in this phase only."""
        return sum(part.bytes for part in self.parts if part.phase == phase)

    def part(self, name: str) -> int:
        """Return the bytes of one part; 0 for one that this configuration does not have."""
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
        """Return (part, GiB, how it is known) of every part, then of both peaks and of the GPU memory needed."""
        parts = [
            (part.name, part.bytes / GIB, f"{'exact' if part.exact else 'approximate'}, {part.phase}: {part.formula}")
            for part in self.parts
        ]
        return [
            *parts,
            ("peak of the rollout stage", self.rollout_peak / GIB, "always + the larger of sampling and decoding"),
            ("peak of the update stage", self.update_peak / GIB, "always + update + the larger of its phases"),
            ("needed", self.needed / GIB, f"the higher peak + {ERROR_MARGIN:.0%} for workspaces and fragmentation"),
        ]


@dataclass(frozen=True)
class Workload:
    """Dtype and sizes of what is computed at once for one stream.

    Attributes:
        dtype: of the weights.
        group_size: drafts of a prompt, or the most renderings of one draft.
        prompts_per_batch: prompts sampled at once.
        micro_batch_size: rows per forward and backward pass.
        eight_bit_optimizer: the optimizer's moments take one byte each.
        sizes: of the images, each once; empty: texts, or images of the size in the settings.
        averages: copies of the trained parameters that an update keeps, such as a moving average.
    """

    dtype: Literal["float32", "bfloat16", "float16"]
    group_size: int
    prompts_per_batch: int
    micro_batch_size: int
    eight_bit_optimizer: bool
    sizes: tuple[ImageSize, ...] = ()
    averages: int = 0


@dataclass(frozen=True)
class ModelEstimate:
    """The memory and disk space that one model needs.

    Attributes:
        memory: of one GPU.
        checkpoint: bytes of a policy version on disk, optimizer state included.
        counted: sizes of the model's parts, as text.
        tokens: number of tokens of an image by its size; empty for texts.
        states: bytes on disk of the denoising states of an image of the largest size; 0 where none are stored.
    """

    memory: MemoryEstimate
    checkpoint: int
    counted: str
    tokens: Mapping[ImageSize, int] = field(default_factory=dict)
    states: int = 0


def estimate_resources(
    kind: str,
    model: str,
    settings: Any,
    choices: Mapping[Stream, TrainingChoice],
    workloads: Mapping[Stream, Workload],
) -> ModelEstimate:
    """Estimate the GPU memory and disk space of a model of this kind; nothing is loaded.

    Args:
        settings: the family's, of its sampler.
        choices: what of each trained component is trained.
        workloads: of the same components.

    Raises:
        InputError: its configuration is not on this machine, or no parameter is trained.
    """
    workload = next(iter(workloads.values()))
    # Adapters too are counted without memory; initializing them takes seconds elsewhere.
    with torch.device("meta"):
        sizes = policy_family(kind).sizes(model, settings, choices, workload.sizes)
    trainings = {
        stream: TrainingEstimate(component, choices[stream], workloads[stream])
        for stream, component in sizes.components.items()
    }
    counted = sizes.described + "".join(training.adapters for training in trainings.values())
    states = 0
    if "denoising" in choices and sizes.state_values is None:
        counted += "; size of states not known"
    elif "denoising" in choices and sizes.state_values:
        # The latents before and after each noisy step.
        states = (settings.sde_window_size + 1) * sizes.state_values * _STATE_BYTES
        largest = max(sizes.tokens, key=lambda size: sizes.tokens[size])
        counted += f"; {states / MIB:.3g} MiB of states per image of {largest}"
    group_size = max(each.group_size for each in workloads.values())
    return ModelEstimate(
        memory=MemoryEstimate(
            tuple(
                part
                for part in (
                    *_weights(sizes, BYTES[workload.dtype]),
                    *_training(trainings),
                    *_sampling(sizes, workload),
                    *_decoding(sizes, min(getattr(settings, "decode_batch_size", 0), group_size), workload),
                )
                if part.bytes
            )
        ),
        checkpoint=sum(training.checkpoint for training in trainings.values()),
        counted=counted,
        tokens=sizes.tokens,
        states=states,
    )


class TrainingEstimate:
    """What training adds to a model: adapters, copies, gradients, moments, a backward pass, and a policy version."""

    def __init__(self, sizes: ComponentSizes, choice: TrainingChoice, workload: Workload) -> None:
        self.sizes, self.choice, self.workload, self.b = sizes, choice, workload, BYTES[workload.dtype]
        self.trained = sum(parameter.numel() for parameter in sizes.trained.trainable_parameters().values())
        # peft keeps adapters in fp32 for a model of any dtype.
        self.trained_bytes = FP32 if choice.lora is not None else self.b

    @property
    def checkpoint(self) -> int:
        """Bytes of a policy version on disk: adapters or the model, their copies, AdamW's two moments."""
        saved = self.trained if self.choice.lora else count_parameters(self.sizes.trained.model)
        return (saved * (1 + self.workload.averages) + 2 * self.trained) * self.trained_bytes

    @property
    def adapters(self) -> str:
        """The number of adapter parameters as text; empty without adapters."""
        return f", adapters {self.trained / 1e6:.3g} M" if self.choice.lora else ""

    def parts(self) -> list[MemoryPart]:
        """Return what training adds outside the backward pass."""
        count, each = self.trained, self.trained_bytes
        moment = 1 if self.workload.eight_bit_optimizer else each
        what = f"{count / 1e6:.4g} M trained parameters x {each} bytes"
        copied = self.choice.lora is not None or self.choice.reference == "device"
        reference = count * each if copied and not self.choice.starts_as_base else 0
        moments = f"2 x {count} moments x {moment} bytes"
        return [
            MemoryPart("adapters", "always", count * each if self.choice.lora else 0, what, exact=True),
            MemoryPart("reference model", "always", reference, "the trained parameters once more", exact=True),
            MemoryPart("moving averages", "update", self.workload.averages * count * each, what, exact=True),
            MemoryPart("gradients", "update", count * each, what, exact=True),
            MemoryPart("optimizer moments", "update", 2 * count * moment, moments, exact=True),
            # The multi-tensor step makes one more tensor for each parameter.
            MemoryPart("optimizer temporaries", "optimizer step", count * each, what),
        ]

    def backward_parts(self) -> list[MemoryPart]:
        """Return what a microbatch keeps for its backward pass, and the largest step of that pass."""
        sizes, rows, b = self.sizes, self.workload.micro_batch_size, self.b
        checkpointed = self.choice.gradient_checkpointing
        values = rows * sizes.passes * sizes.positions * sizes.width
        # Checkpointing keeps each block's input and computes one block at a time again (arXiv:1604.06174).
        kept_values = values * sizes.steps * sizes.blocks + rows * sizes.encoder_values
        kept = kept_values * (b if checkpointed else _KEPT_BY_BLOCK[b])
        block = values * (2 * _MADE_BY_BLOCK * b + (_KEPT_BY_BLOCK[b] if checkpointed else 0))
        which = "each block's input" if checkpointed else "every block's"
        formula = f"{rows} rows x {sizes.steps * sizes.passes} passes x {sizes.positions} positions: {which}"
        return [
            MemoryPart("activations", "backward", kept, formula),
            MemoryPart("backward pass at work", "backward", max(block, self._logits()), "one block, or the log-probs"),
        ]

    def _logits(self) -> int:
        """Return the bytes of a microbatch's log-probs, whose logits are made for a chunk of tokens at a time."""
        sizes, b = self.sizes, self.b
        scored, head = self.workload.micro_batch_size * sizes.scored, sizes.vocabulary * sizes.width * b
        at_once = min(scored, CHUNK_TOKENS) * _SCORED_ID * sizes.vocabulary
        whole = 2 * scored * sizes.vocabulary * b if sizes.whole_logits else 0
        # Where the head is trained, its gradient is added up.
        return 3 * scored * sizes.width * b + at_once + whole + (0 if self.choice.lora else head)


def _weights(sizes: ModelSizes, value_bytes: int) -> Iterator[MemoryPart]:
    for name, count in sizes.networks.items():
        formula = f"{count / 1e9:.3g} B parameters x {value_bytes} bytes"
        few, few_bytes = sizes.quantized.get(name, (0, 0))
        if few:
            formula = f"{few / 1e9:.3g} B x {few_bytes / few:.3g} bytes, {(count - few) / 1e9:.3g} B x {value_bytes}"
        yield MemoryPart(name, "always", few_bytes + (count - few) * value_bytes, formula, exact=True)
    yield MemoryPart("device overhead", "always", GIB, "CUDA context and the libraries' own buffers")
    for name, kept in sizes.kept_bytes.items():
        yield MemoryPart(name, "always", kept, "kept at most")


def _training(trainings: Mapping[Stream, TrainingEstimate]) -> Iterator[MemoryPart]:
    """Yield what training adds. Of several updates the one that needs most counts: one ends before the next begins."""
    updates: list[MemoryEstimate] = []
    for stream, training in trainings.items():
        parts = training.parts()
        for part in (part for part in parts if part.phase == "always"):
            yield replace(part, name=f"{stream} {part.name}") if updates else part
        updates.append(
            MemoryEstimate((*(part for part in parts if part.phase != "always"), *training.backward_parts()))
        )
    yield from max(updates, key=lambda update: update.update_peak).parts


def _sampling(sizes: ModelSizes, workload: Workload) -> Iterator[MemoryPart]:
    """Yield the key-value cache, and one step's logits with the sampling distribution in fp32 and fp64."""
    rows, b = workload.prompts_per_batch * workload.group_size, BYTES[workload.dtype]
    yield MemoryPart("key-value cache", "sampling", rows * sizes.cached * b, f"{rows} rows x {sizes.cached} values")
    distribution = rows * sizes.head * (b + FP32 + 4 * 8)
    yield MemoryPart("sampling distribution", "sampling", distribution, "one step's logits, fp64 sums")


def _decoding(sizes: ModelSizes, rows: int, workload: Workload) -> Iterator[MemoryPart]:
    """Yield the largest tensors while images are made: a block for all rows, or the autoencoder's.

    The autoencoder has about 4 tensors of [channels, height, width] for an image, or for all that it decodes at once.

    Args:
        rows: images that are denoised at once.
    """
    decoded = max(sizes.image_pixels, min(rows * sizes.image_pixels, PIXELS_AT_ONCE))
    values = max(_MADE_BY_BLOCK * rows * sizes.image_values, 4 * sizes.image_channels * decoded)
    formula = f"a block for {rows} images, or the autoencoder"
    yield MemoryPart("decoding", "decoding", values * BYTES[workload.dtype], formula)
