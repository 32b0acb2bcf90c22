"""Estimate the GPU memory and disk space that a configuration needs, part by part, before anything is loaded.

Weights, adapters, copies, gradients, optimizer moments and a policy version's files are exact: their parameters are
counted on the model built on the meta device. What a pass computes is approximate: bytes for each position of a row,
block and unit of hidden width, taken from the tensors that autograd keeps on a CPU of SD3's, FLUX's, Qwen-Image's,
Z-Image's and GLM-Image's blocks: 69 to 131 bytes in fp32, 42 to 96 in 16 bits, where norms and adapters keep copies in
fp32. It has not been compared with a GPU; kernels' workspaces and the allocator's fragmentation are in ERROR_MARGIN.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from grpo_core.logprobs import CHUNK_TOKENS
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.sizes import ComponentSizes, ModelSizes, count_parameters, shown_count
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.streams import PIXELS_AT_ONCE, ImageSize, Stream

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

Phase = Literal[
    "encoding", "sampling", "decoding", "tokens backward", "tokens step", "denoising backward", "denoising step"
]

PHASES: Mapping[Phase, str] = MappingProxyType(
    {
        "encoding": "rollouts: encode prompts",
        "sampling": "rollouts: sample tokens",
        "decoding": "rollouts: denoise and decode images",
        "tokens backward": "update of tokens: passes",
        "tokens step": "update of tokens: optimizer step",
        "denoising backward": "update of denoising: passes",
        "denoising step": "update of denoising: optimizer step",
    }
)
"""What the phases are called; the first three are those of the rollout stage, and one ends before the next begins."""

ALWAYS = frozenset(PHASES)


@dataclass(frozen=True)
class MemoryPart:
    """One part of the memory.

    Attributes:
        name: of the part.
        bytes: its size.
        formula: how the size is computed, as text.
        exact: whether it is counted; otherwise it is estimated by a formula.
        phases: when it is on the GPU.
        offloaded: whether it is in CPU memory in the other phases.
    """

    name: str
    bytes: int
    formula: str
    exact: bool = False
    phases: frozenset[Phase] = ALWAYS
    offloaded: bool = False


@dataclass(frozen=True)
class MemoryEstimate:
    """The GPU memory that a configuration needs.

    Attributes:
        parts: all of them; names are unique.
        phases: those that the configuration has, in order.
    """

    parts: tuple[MemoryPart, ...]
    phases: tuple[Phase, ...] = tuple(PHASES)

    def part(self, name: str) -> int:
        """Return the bytes of one part; 0 for one that this configuration does not have."""
        return sum(part.bytes for part in self.parts if part.name == name)

    def in_phase(self, phase: Phase, *, exact: bool) -> int:
        """Return the bytes that are on the GPU in a phase, those that are counted or those that are estimated."""
        return sum(part.bytes for part in self.parts if phase in part.phases and part.exact == exact)

    def _peak(self, *, rollouts: bool) -> int:
        chosen = [phase for phase in self.phases if PHASES[phase].startswith("rollouts") == rollouts]
        return max((self.in_phase(each, exact=True) + self.in_phase(each, exact=False) for each in chosen), default=0)

    @property
    def rollout_peak(self) -> int:
        """Bytes at the peak of the rollout stage."""
        return self._peak(rollouts=True)

    @property
    def update_peak(self) -> int:
        """Bytes at the peak of the update stage: activations are gone when the optimizer steps."""
        return self._peak(rollouts=False)

    @property
    def needed(self) -> int:
        """Bytes that a GPU should have: the higher peak and the margin."""
        return int(max(self.rollout_peak, self.update_peak) * (1 + ERROR_MARGIN))

    @property
    def offloaded(self) -> Mapping[str, int]:
        """The bytes in CPU memory by part: what is offloaded, at least at times."""
        return {part.name: part.bytes for part in self.parts if part.offloaded}

    def part_rows(self) -> list[dict[str, str]]:
        """Return each part with its GiB, exact or approximate, and how they are computed."""
        return [
            {
                "part": part.name,
                "exact GiB": _gib(part.bytes) if part.exact else "",
                "approximate GiB": "" if part.exact else _gib(part.bytes),
                "from": part.formula,
            }
            for part in self.parts
        ]

    def phase_rows(self) -> list[dict[str, str]]:
        """Return each phase with its GiB and the parts that are on the GPU, then the memory that a GPU should have."""
        rows = []
        for phase in self.phases:
            exact, approximate = (self.in_phase(phase, exact=each) for each in (True, False))
            rows.append(
                {
                    "phase": PHASES[phase],
                    "exact GiB": _gib(exact),
                    "approximate GiB": _gib(approximate),
                    "GiB": _gib(exact + approximate),
                    "on the GPU": ", ".join(part.name for part in self.parts if phase in part.phases),
                }
            )
        margin = f"the largest phase + {ERROR_MARGIN:.0%} for workspaces and fragmentation"
        none = {"exact GiB": "", "approximate GiB": ""}
        return [*rows, {"phase": "needed", **none, "GiB": _gib(self.needed), "on the GPU": margin}]


def _gib(count: int) -> str:
    gib = count / GIB
    return f"{gib:.2f}" if gib >= 0.01 or not count else f"{gib:.2g}"


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
        offload_optimizer: the optimizer's moments are in CPU memory.
    """

    dtype: Literal["float32", "bfloat16", "float16"]
    group_size: int
    prompts_per_batch: int
    micro_batch_size: int
    eight_bit_optimizer: bool
    sizes: tuple[ImageSize, ...] = ()
    averages: int = 0
    offload_optimizer: bool = False


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
    *,
    offload: bool = False,
    longest: int | None = None,
) -> ModelEstimate:
    """Estimate the GPU memory and disk space of a model of this kind; nothing is loaded.

    Args:
        settings: the family's, of its sampler.
        choices: what of each trained component is trained.
        workloads: of the same components.
        offload: whether networks that a phase does not need are in CPU memory.
        longest: ids of the longest prompt; None: an assumed number.

    Raises:
        InputError: its configuration is not on this machine, or no parameter is trained.
    """
    workload = next(iter(workloads.values()))
    # Adapters too are counted without memory; initializing them takes seconds elsewhere.
    with torch.device("meta"):
        sizes = policy_family(kind).sizes(model, settings, choices, workload.sizes, longest)
    trainings = {
        stream: TrainingEstimate(component, choices[stream], workloads[stream], stream, first=not place)
        for place, (stream, component) in enumerate(sizes.components.items())
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
    at_once = min(getattr(settings, "decode_batch_size", 0), group_size)
    parts = (
        *_weights(sizes, BYTES[workload.dtype], choices, offload=offload),
        *itertools.chain.from_iterable(each.parts() + each.backward_parts() for each in trainings.values()),
        *_sampling(sizes, workload),
        *_decoding(sizes, at_once, workload),
    )
    held = tuple(part for part in parts if part.bytes)
    return ModelEstimate(
        memory=MemoryEstimate(held, _phases(sizes, held)),
        checkpoint=sum(training.checkpoint for training in trainings.values()),
        counted=counted,
        tokens=sizes.tokens,
        states=states,
    )


def _phases(sizes: ModelSizes, parts: Iterable[MemoryPart]) -> tuple[Phase, ...]:
    """Return the phases that there are; prompts are encoded in one of their own where encoders are offloaded."""
    found: dict[Phase, bool] = {
        "encoding": any(part.offloaded and "encoding" in part.phases for part in parts),
        "sampling": sizes.cached > 0,
        "decoding": sizes.image_pixels > 0,
        "tokens backward": "tokens" in sizes.components,
        "denoising backward": "denoising" in sizes.components,
    }
    found |= {"tokens step": found["tokens backward"], "denoising step": found["denoising backward"]}
    return tuple(phase for phase in PHASES if found[phase])


_BACKWARD: Mapping[Stream, Phase] = MappingProxyType({"tokens": "tokens backward", "denoising": "denoising backward"})
_STEP: Mapping[Stream, Phase] = MappingProxyType({"tokens": "tokens step", "denoising": "denoising step"})


class TrainingEstimate:
    """What training adds to a model: adapters, copies, gradients, moments, a backward pass, and a policy version."""

    def __init__(
        self,
        sizes: ComponentSizes,
        choice: TrainingChoice,
        workload: Workload,
        stream: Stream = "tokens",
        *,
        first: bool = True,
    ) -> None:
        """Count what is trained.

        Args:
            first: whether the names of its parts go without the stream.
        """
        self._prefix = "" if first else f"{stream} "
        self._backward: frozenset[Phase] = frozenset({_BACKWARD[stream]})
        self._step: frozenset[Phase] = frozenset({_STEP[stream]})
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
        return f", adapters {shown_count(self.trained)}" if self.choice.lora else ""

    def parts(self) -> list[MemoryPart]:
        """Return what training adds outside the backward pass."""
        count, each = self.trained, self.trained_bytes
        moment = 1 if self.workload.eight_bit_optimizer else each
        what = f"{shown_count(count)} trained parameters x {each} bytes"
        copied = self.choice.lora is not None or self.choice.reference == "device"
        reference = count * each if copied and not self.choice.starts_as_base else 0
        moments = f"2 x {count} moments x {moment} bytes"
        update = self._backward | self._step
        largest = max((each.numel() for each in self.sizes.trained.trainable_parameters().values()), default=0)
        # On the device there are those of one parameter, while it is changed.
        offloaded, where = self.workload.offload_optimizer, frozenset[Phase]()
        own = [
            MemoryPart("adapters", count * each if self.choice.lora else 0, what, exact=True),
            MemoryPart("reference model", reference, "the trained parameters once more", exact=True),
            MemoryPart("moving averages", self.workload.averages * count * each, what, exact=True, phases=update),
            MemoryPart("gradients", count * each, what, exact=True, phases=update),
            MemoryPart(
                "optimizer moments",
                2 * count * moment,
                f"{moments}, in CPU memory" if offloaded else moments,
                exact=True,
                phases=where if offloaded else update,
                offloaded=offloaded,
            ),
            # The multi-tensor step makes one more tensor for each parameter.
            MemoryPart(
                "optimizer temporaries",
                3 * largest * each if offloaded else count * each,
                "the largest parameter's moments" if offloaded else what,
                phases=self._step,
            ),
        ]
        return [replace(part, name=f"{self._prefix}{part.name}") for part in own]

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
            MemoryPart(f"{self._prefix}activations", kept, formula, phases=self._backward),
            MemoryPart(
                f"{self._prefix}backward pass at work",
                max(block, self._logits()),
                "one block, or the log-probs",
                phases=self._backward,
            ),
        ]

    def _logits(self) -> int:
        """Return the bytes of a microbatch's log-probs, whose logits are made for a chunk of tokens at a time."""
        sizes, b = self.sizes, self.b
        scored, head = self.workload.micro_batch_size * sizes.scored, sizes.vocabulary * sizes.width * b
        at_once = min(scored, CHUNK_TOKENS) * _SCORED_ID * sizes.vocabulary
        whole = 2 * scored * sizes.vocabulary * b if sizes.whole_logits else 0
        # Where the head is trained, its gradient is added up.
        return 3 * scored * sizes.width * b + at_once + whole + (0 if self.choice.lora else head)


def _weights(
    sizes: ModelSizes, value_bytes: int, choices: Mapping[Stream, TrainingChoice], *, offload: bool
) -> Iterator[MemoryPart]:
    full = {stream for stream, choice in choices.items() if choice.lora is None}
    for name, count in sizes.networks.items():
        formula = f"{shown_count(count)} parameters x {value_bytes} bytes"
        few, few_bytes = sizes.quantized.get(name, (0, 0))
        if few:
            formula = f"{shown_count(few)} x {few_bytes / few:.3g} bytes, {shown_count(count - few)} x {value_bytes}"
        # A network whose own weights are trained stays.
        needed = sizes.needed.get(name)
        moved = offload and needed is not None and not any(_STEP[stream] in needed for stream in full)
        phases = needed if moved and needed is not None else ALWAYS
        size = few_bytes + (count - few) * value_bytes
        yield MemoryPart(name, size, formula, exact=True, phases=phases, offloaded=moved)
    yield MemoryPart("device overhead", GIB, "CUDA context and the libraries' own buffers")
    for name, kept in sizes.kept_bytes.items():
        yield MemoryPart(name, kept, "kept at most")


def _sampling(sizes: ModelSizes, workload: Workload) -> Iterator[MemoryPart]:
    """Yield the key-value cache, and one step's logits with the sampling distribution in fp32 and fp64."""
    during = frozenset[Phase]({"sampling"})
    rows, b = workload.prompts_per_batch * workload.group_size, BYTES[workload.dtype]
    yield MemoryPart("key-value cache", rows * sizes.cached * b, f"{rows} rows x {sizes.cached} values", phases=during)
    distribution = rows * sizes.head * (b + FP32 + 4 * 8)
    yield MemoryPart("sampling distribution", distribution, "one step's logits, fp64 sums", phases=during)


def _decoding(sizes: ModelSizes, rows: int, workload: Workload) -> Iterator[MemoryPart]:
    """Yield the largest tensors while images are made: a block for all rows, or the autoencoder's.

    The autoencoder has about 4 tensors of [channels, height, width] for an image, or for all that it decodes at once.

    Args:
        rows: images that are denoised at once.
    """
    decoded = max(sizes.image_pixels, min(rows * sizes.image_pixels, PIXELS_AT_ONCE))
    values = max(_MADE_BY_BLOCK * rows * sizes.image_values, 4 * sizes.image_channels * decoded)
    formula = f"a block for {rows} images, or the autoencoder"
    yield MemoryPart("decoding", values * BYTES[workload.dtype], formula, phases=frozenset({"decoding"}))
