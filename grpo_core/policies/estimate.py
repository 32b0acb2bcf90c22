"""Estimate the GPU memory and disk space that a configuration needs, part by part, before anything is loaded.

Weights, adapters, copies, gradients, optimizer moments and a policy version's files are exact: their parameters are
counted on the meta device. What a pass computes is bytes for each position, block and unit of hidden width, taken from
what autograd keeps of blocks of SD3, FLUX, Qwen-Image, Z-Image and GLM-Image (69 to 131 in fp32, 42 to 96 in 16 bits).
PyTorch's allocator is within 9 % of it; workspaces and fragmentation are in ERROR_MARGIN.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from grpo_core.logprobs import CHUNK_TOKENS, GPU_BLOCK, KEPT_CHUNKS
from grpo_core.policies.microbatches import PASS_POSITIONS, computed_positions
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.sizes import ComponentSizes, ModelSizes, Phase, count_parameters, shown_count
from grpo_core.policies.trained.quantization import BYTES_IN_4_BITS
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.streams import PIXELS_AT_ONCE, ImageSize, Stream
from grpo_core.sampling import TOKENS_PER_LOOK

GIB, MIB = 1024**3, 1024**2
ERROR_MARGIN = 0.15
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_KEPT_BY_BLOCK = {4: 92, 2: 78}
"""Bytes that a block keeps for its backward pass, for each position and unit of hidden width, by bytes per value."""

_MADE_BY_BLOCK = 16
"""Values that a block's forward pass has at once, for each position and unit of hidden width; a backward pass has their
gradients too."""

_READ_BY_BLOCK = 4
"""Values of keys and values that a block keeps for each position of a shared prompt, row and unit of hidden width."""

_STATE_BYTES = 2
"""States are stored in 16 bits."""

PHASES: Mapping[Phase, str] = MappingProxyType(
    {
        "encoding": "encode prompts",
        "sampling": "sample tokens",
        "decoding": "denoise and decode images",
        "tokens update": "update of tokens",
        "denoising update": "update of denoising",
    }
)
"""What the phases are called; one ends before the next begins."""

ALWAYS = frozenset(PHASES)


@dataclass(frozen=True)
class MemoryPart:
    """One part of the memory, in bytes, counted or estimated, and the phases in which it is on the GPU.

    `by_step` are its bytes if denoising steps are gone back one by one, where the update may choose so.
    """

    name: str
    bytes: int
    exact: bool = False
    phases: frozenset[Phase] = ALWAYS
    offloaded: bool = False
    by_step: int | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """The GPU memory that a configuration needs: its parts, by unique names, and its phases, in order."""

    parts: tuple[MemoryPart, ...]
    phases: tuple[Phase, ...]

    def in_phase(self, phase: Phase) -> int:
        """Return the bytes that are on the GPU in a phase."""
        return sum(part.bytes for part in self.parts if phase in part.phases)

    @property
    def needed(self) -> int:
        """Bytes that a GPU should have: the largest phase and the margin."""
        return int(max(map(self.in_phase, self.phases)) * (1 + ERROR_MARGIN))

    def one_by_one(self) -> "MemoryEstimate":
        """Return the memory with a backward pass for each denoising step, where the update may choose so."""
        parts = (each if each.by_step is None else replace(each, bytes=each.by_step) for each in self.parts)
        return replace(self, parts=tuple(parts))

    @property
    def offloaded(self) -> Mapping[str, int]:
        """The bytes in CPU memory by part: what is offloaded, at least at times."""
        return {part.name: part.bytes for part in self.parts if part.offloaded}


@dataclass(frozen=True)
class Workload:
    """Dtype and sizes of what is computed at once for one stream.

    Attributes:
        group_size: drafts of a prompt, or the most renderings of one draft.
        prompts_per_batch: prompts sampled at once.
        micro_batch_size: rows per forward and backward pass.
        eight_bit_optimizer: the optimizer's moments take one byte each.
        moments: of the optimizer for each trained value.
        sizes: of the images, each once; empty: texts, or images of the size in the settings.
        averages: copies of the trained parameters that an update keeps, such as a moving average.
        offload_optimizer: the optimizer's moments are in CPU memory.
        autocast: dtype of matrix products; None: that of the weights.
        prompts: of a microbatch, at most, where rows share them and the model computes them once; 0: no row shares.
        backward_per_step: as of an update of denoising.
    """

    dtype: Literal["float32", "bfloat16", "float16"]
    group_size: int
    prompts_per_batch: int
    micro_batch_size: int
    eight_bit_optimizer: bool
    sizes: tuple[ImageSize, ...] = ()
    moments: int = 2
    averages: int = 0
    offload_optimizer: bool = False
    autocast: Literal["bfloat16", "float16"] | None = None
    prompts: int = 0
    backward_per_step: Literal["auto"] | bool = False


@dataclass(frozen=True)
class ModelEstimate:
    """The memory of one GPU and the disk space that a model needs.

    Attributes:
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
    reward_models: int = 0,
) -> ModelEstimate:
    """Estimate the GPU memory and disk space of a model of this kind; nothing is loaded.

    Args:
        choices: what of each trained component is trained.
        workloads: of the same components.
        offload: whether networks that a phase does not need are in CPU memory.
        longest: ids of the longest prompt; None: an assumed number.
        reward_models: bytes of networks on the same GPU that score the samples.

    Raises:
        InputError: its configuration is not on this machine, or no parameter is trained.
    """
    workload = next(iter(workloads.values()))
    # Adapters too are counted without memory; initializing them takes seconds elsewhere.
    with torch.device("meta"):
        sizes = policy_family(kind).sizes(model, settings, choices, workload.sizes, longest)
    parts = [*_weights(sizes, BYTES[workload.dtype], choices, offload=offload), *_sampling(sizes, settings, workloads)]
    parts.append(MemoryPart("reward models", reward_models))
    counted = ", ".join(f"{name} {shown_count(count)}" for name, count in sizes.networks.items())
    counted += f" parameters, prompts counted as {sizes.prompt} ids"
    checkpoint = 0
    for stream, component in sizes.components.items():
        choice = choices[stream]
        parts += training_parts(stream, component, choice, workloads[stream])
        trained = _trained(component)
        saved = trained if choice.lora else count_parameters(component.trained.model)
        # Adapters or the model, their copies, and the optimizer's moments.
        values = saved * (1 + workloads[stream].averages) + workloads[stream].moments * trained
        checkpoint += values * _trained_bytes(choice, workloads[stream])
        counted += f", {stream} adapters {shown_count(trained)}" if choice.lora else ""
    states = 0
    if "denoising" in choices and sizes.state_values is None:
        counted += "; size of states not known"
    elif "denoising" in choices and sizes.state_values:
        # The latents before and after each noisy step.
        states = (settings.sde_window_size + 1) * sizes.state_values * _STATE_BYTES
        largest = max(sizes.tokens, key=lambda size: sizes.tokens[size])
        counted += f"; {states / MIB:.3g} MiB of states per image of {largest}"
    held = tuple(part for part in parts if part.bytes)
    return ModelEstimate(MemoryEstimate(held, _phases(sizes, held)), checkpoint, counted, sizes.tokens, states)


def _phases(sizes: ModelSizes, parts: tuple[MemoryPart, ...]) -> tuple[Phase, ...]:
    """Return the phases that there are; prompts are encoded in one of their own where encoders are offloaded."""
    found: dict[Phase, bool] = {
        "encoding": any(part.offloaded and "encoding" in part.phases for part in parts),
        "sampling": sizes.cached > 0,
        "decoding": sizes.image_pixels > 0,
        "tokens update": "tokens" in sizes.components,
        "denoising update": "denoising" in sizes.components,
    }
    return tuple(phase for phase in PHASES if found[phase])


def _update_of(stream: Stream) -> Phase:
    return "tokens update" if stream == "tokens" else "denoising update"


def _trained(sizes: ComponentSizes) -> int:
    return sum(parameter.numel() for parameter in sizes.trained.trainable_parameters().values())


def _trained_bytes(choice: TrainingChoice, workload: Workload) -> int:
    """Return the bytes of a trained value: peft keeps adapters in fp32 for a model of any dtype."""
    return BYTES["float32"] if choice.lora is not None else BYTES[workload.dtype]


def _weights(
    sizes: ModelSizes, value_bytes: int, choices: Mapping[Stream, TrainingChoice], *, offload: bool
) -> Iterator[MemoryPart]:
    full = {_update_of(stream) for stream, choice in choices.items() if choice.lora is None}
    for name, count in sizes.networks.items():
        few = sizes.quantized.get(name, 0)
        # A network whose own weights are trained stays.
        moved = offload and name in sizes.needed and full.isdisjoint(sizes.needed[name])
        phases = sizes.needed[name] if moved else ALWAYS
        size = int(few * BYTES_IN_4_BITS) + (count - few) * value_bytes
        yield MemoryPart(name, size, exact=True, phases=phases, offloaded=moved)
    yield MemoryPart("CUDA context", GIB)


def training_parts(
    stream: Stream, sizes: ComponentSizes, choice: TrainingChoice, workload: Workload
) -> Iterator[MemoryPart]:
    """Yield what training adds to a model: adapters, copies, gradients, moments, and a microbatch's passes."""
    count, each, update = _trained(sizes), _trained_bytes(choice, workload), frozenset[Phase]({_update_of(stream)})
    moment, offloaded = 1 if workload.eight_bit_optimizer else each, workload.offload_optimizer
    largest = max((value.numel() for value in sizes.trained.trainable_parameters().values()), default=0)
    copied = (choice.lora is not None or choice.reference == "device") and not choice.starts_as_base
    # The multi-tensor step makes one more tensor for each parameter.
    step = 3 * largest * each if offloaded else count * each
    yield MemoryPart(f"{stream} adapters", count * each if choice.lora else 0, exact=True)
    yield MemoryPart(f"{stream} reference", count * each if copied else 0, exact=True)
    yield MemoryPart(f"{stream} averages", workload.averages * count * each, exact=True, phases=update)
    yield MemoryPart(f"{stream} gradients", count * each, exact=True, phases=update)
    yield MemoryPart(
        f"{stream} moments",
        workload.moments * count * moment,
        exact=True,
        phases=frozenset() if offloaded else update,
        offloaded=offloaded,
    )
    sampling = frozenset[Phase]({"sampling" if stream == "tokens" else "decoding"})
    plain = choice.lora is not None and not choice.lora.use_dora and choice.quantization is None
    if plain and workload.dtype == "bfloat16":
        # `adapter_products` keeps each value three times.
        yield MemoryPart(f"{stream} adapters in bfloat16", 3 * count * BYTES["bfloat16"], phases=sampling)
    by_step, window = (_activations(sizes, choice, workload, steps=steps) for steps in (1, sizes.steps))
    cast, activations = 0, by_step if workload.backward_per_step is True else window
    if workload.autocast is not None and each == BYTES["float32"]:
        # torch keeps what it casts of trained weights, for as long as autocast is on: not in an optimizer step.
        cast = count * BYTES[workload.autocast]
    passes = activations + cast >= step
    yield MemoryPart(f"{stream} weights in {workload.autocast}", cast, phases=sampling | update if passes else sampling)
    name, size = ("activations", activations) if passes else ("optimizer step", step)
    less = max(by_step, step) if workload.backward_per_step == "auto" else None
    yield MemoryPart(f"{stream} {name}", size, phases=update, by_step=less)


def _activations(sizes: ComponentSizes, choice: TrainingChoice, workload: Workload, *, steps: int) -> int:
    """Return what a microbatch keeps for its backward pass, and the largest step of that pass: a block, or its logits.

    The pass goes over as many denoising steps. Checkpointing keeps each block's input (arXiv:1604.06174). A trained
    head's gradient is added up over chunks.
    """
    rows, b = workload.micro_batch_size, BYTES[workload.dtype]
    again = choice.gradient_checkpointing
    prompts, shared = _shared(sizes, rows, workload.prompts)
    values = (prompts * shared + rows * (sizes.positions - shared)) * sizes.width
    kept = values * sizes.passes * steps * sizes.blocks + prompts * sizes.encoder_values
    # Each block of a completion reads its prompt, in one piece with what it adds.
    read = _READ_BY_BLOCK * b * rows * shared * sizes.width * (1 if again else sizes.blocks)
    block = values * (2 * _MADE_BY_BLOCK * b + (_KEPT_BY_BLOCK[b] if again else 0))
    scored, head = rows * sizes.scored, 0 if choice.lora else sizes.vocabulary * sizes.width * b
    whole = 2 * scored * sizes.vocabulary * b if sizes.whole_logits else 0
    logits = 3 * scored * sizes.width * b + _logits(sizes, scored, b) + whole + head
    return kept * (b if again else _KEPT_BY_BLOCK[b]) + read + max(block, logits)


def _shared(sizes: ComponentSizes, rows: int, prompts: int) -> tuple[int, int]:
    """Return how many prompts a microbatch computes, and their ids that rows share; 0 where each computes its own."""
    lengths, prompts = [sizes.positions - sizes.shared + 1] * rows, min(prompts, rows)
    if not sizes.shared or not prompts:
        return rows, 0
    whole, shared = computed_positions(lengths, prompts, sizes.shared, PASS_POSITIONS["cuda"])
    return (prompts, sizes.shared) if shared < whole else (rows, 0)


def _logits(sizes: ComponentSizes, scored: int, b: int) -> int:
    """Return what the ids that the scored tokens can be take: log-probs that are kept, and what a chunk makes of them.

    With a support, log-probs are normalised a second time after its mask, and of one chunk only they are kept.
    """
    chunk = min(scored, CHUNK_TOKENS) * sizes.vocabulary
    kept = (4 + 4 + 1) * chunk if sizes.truncated else 4 * min(scored, KEPT_CHUNKS * CHUNK_TOKENS) * sizes.vocabulary
    # The head's output and its quotient by the temperature; afterwards three values of an entropy, block by block.
    return kept + max((b + 4) * chunk, 3 * 4 * min(chunk, GPU_BLOCK))


def _drawn(settings: Any, b: int) -> int:
    """Return the bytes of an id that a token can be while it is drawn: a logit, its log-prob and its probability.

    Where the distribution is cut, the ids that are left wait as masks, and each cut has values of its own; a nucleus is
    sorted, by ids of eight bytes.
    """
    if not getattr(settings, "truncates", False):
        return b + 4 + 4
    cut = 4 + 40 if settings.top_p < 1 else 4 + 4 + 4 + 4 * (settings.min_p > 0)
    return b + TOKENS_PER_LOOK + cut


def _sampling(sizes: ModelSizes, settings: Any, workloads: Mapping[Stream, Workload]) -> Iterator[MemoryPart]:
    """Yield the key-value cache, what a token is drawn from, and the largest tensors of images."""
    workload = next(iter(workloads.values()))
    rows, b = workload.prompts_per_batch * workload.group_size, BYTES[workload.dtype]
    # Under autocast too: keys that are rotated, and the values beside them, are of the weights' dtype again.
    yield MemoryPart("key-value cache", rows * sizes.cached * b, phases=frozenset({"sampling"}))
    yield MemoryPart("sampling distribution", rows * sizes.head * _drawn(settings, b), phases=frozenset({"sampling"}))
    images = min(getattr(settings, "decode_batch_size", 0), max(each.group_size for each in workloads.values()))
    pixels = images * sizes.image_pixels
    # The autoencoder has about four tensors of its block before the last.
    decoded = 4 * sizes.image_channels * (pixels if pixels <= PIXELS_AT_ONCE else sizes.image_pixels)
    values = max(_MADE_BY_BLOCK * images * sizes.image_values, decoded)
    yield MemoryPart("decoding", values * b, phases=frozenset({"decoding"}))
