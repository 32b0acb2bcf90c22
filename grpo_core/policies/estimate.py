"""Estimate the GPU memory and disk space that a configuration needs, part by part, before anything is loaded.

Parameters are counted on the model built on the meta device, with its adapters; gradients, optimizer moments and the
key-value cache follow exactly. Activations are a formula for a pre-norm layer with a gated MLP under
scaled_dot_product_attention: checked against tensors in memory on a CPU, not against a GPU with the released weights.
Kernels' workspaces and the allocator's fragmentation are in ERROR_MARGIN, not in the parts.

Symbols: b bytes per value, h hidden, m intermediate, d heads x head_dim, L ids per row, T of them sampled.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn

from grpo_core.image_size import ImageSize
from grpo_core.logprobs import CHUNK_TOKENS
from grpo_core.policies.trained import TrainedModel, TrainingChoice
from grpo_core.streams import Stream

GIB = 1024**3
ERROR_MARGIN = 0.15
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP32 = 4

Phase = Literal["always", "sampling", "decoding", "update", "backward", "optimizer step"]


@dataclass(frozen=True)
class MemoryPart:
    """One part of the memory.

    Attributes:
        name: of the part.
        phase: when it is in memory: always, in one phase of the rollout stage (sampling, decoding), during all of
            the update stage, or in one phase of it (backward, optimizer step).
        bytes: its size.
        formula: how the size is computed, in words.
    """

    name: str
    phase: Phase
    bytes: int
    formula: str


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
        """Return (part, GiB, formula in words) of every part, then of both peaks and of the GPU memory needed."""
        parts = [(part.name, part.bytes / GIB, f"{part.formula} ({part.phase})") for part in self.parts]
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
        averages: moving averages of the trained parameters that are kept.
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

    It stands beside the kind's family and not in it: a corrected estimate leaves the stages' cache keys alone.

    Args:
        choices: what of each trained component is trained.
        workloads: of the same components.

    Raises:
        InputError: its configuration is not on this machine, or no parameter is trained.
    """
    module = import_module(f"grpo_core.policies.{kind}.estimate")
    # Adapters too are counted without memory; initializing them takes seconds elsewhere.
    with torch.device("meta"):
        estimate: ModelEstimate = module.estimate(model, settings, choices, workloads)
    return estimate


def count_parameters(module: nn.Module) -> int:
    """Count the elements of all parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


class TrainingEstimate:
    """What training adds to a model: adapters or a reference, gradients, moments, averages, and a policy version."""

    def __init__(self, trained: TrainedModel, choice: TrainingChoice, workload: Workload) -> None:
        """Count parameters.

        Args:
            trained: the model on the meta device, with the choice applied.
        """
        self.choice, self.workload, self.b = choice, workload, BYTES[workload.dtype]
        adapters = choice.lora is not None
        self.trained = sum(parameter.numel() for parameter in trained.trainable_parameters().values())
        self.parameters = count_parameters(trained.model) - (self.trained if adapters else 0)
        # peft keeps adapters in fp32 for a model of any dtype.
        self.trained_bytes = FP32 if adapters else self.b

    @property
    def checkpoint(self) -> int:
        """Bytes of a policy version on disk: adapters or the model, their moving averages, AdamW's two moments."""
        saved = (self.trained if self.choice.lora else self.parameters) * (1 + self.workload.averages)
        return saved * self.trained_bytes + 2 * self.trained * self.trained_bytes

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
        copies = count * each if copied and not self.choice.starts_as_base else 0
        return [
            MemoryPart("adapters", "always", count * each if self.choice.lora else 0, what),
            MemoryPart("reference model", "always", copies, "the trained parameters once more"),
            MemoryPart("moving averages", "update", self.workload.averages * count * each, what),
            MemoryPart("gradients", "update", count * each, what),
            MemoryPart("optimizer moments", "update", 2 * count * moment, f"2 x {count} moments x {moment} bytes"),
            # The multi-tensor step makes one more tensor for each parameter.
            MemoryPart("optimizer temporaries", "optimizer step", count * each, what),
        ]


def combine_parts(
    weights: Mapping[str, int],
    value_bytes: int,
    components: Mapping[Stream, tuple[TrainingEstimate, Sequence[MemoryPart]]],
    others: Iterable[MemoryPart],
) -> MemoryEstimate:
    """Join all parts of a model's memory: weights, what training adds, and the others; parts of no bytes are left out.

    Of the updates of several components only the one that needs most counts: one ends before the next begins.

    Args:
        weights: number of parameters of each network, by the name of its part.
        value_bytes: bytes of a parameter.
        components: what training adds to each, and the parts of its backward pass.
        others: the parts of sampling and decoding.
    """
    parts = [
        MemoryPart(name, "always", count * value_bytes, f"{count / 1e9:.3g} B parameters x {value_bytes} bytes")
        for name, count in weights.items()
    ]
    parts.append(MemoryPart("device overhead", "always", GIB, "CUDA context and the libraries' own buffers"))
    updates: list[MemoryEstimate] = []
    for stream, (training, backward) in components.items():
        prefix = f"{stream} " if updates else ""
        always = [part for part in training.parts() if part.phase == "always"]
        parts += [replace(part, name=f"{prefix}{part.name}") for part in always]
        updates.append(MemoryEstimate((*(part for part in training.parts() if part not in always), *backward)))
    largest = max(updates, key=lambda update: update.update_peak)
    return MemoryEstimate(tuple(part for part in (*parts, *largest.parts, *others) if part.bytes))


def sampling_parts(config: Any, workload: Workload, length: int, vocabulary: int, ids: int) -> list[MemoryPart]:
    """Return the key-value cache, and one step's logits with the sampling distribution in fp32 and fp64.

    Args:
        config: of the transformer that samples tokens, trained or not.
        length: ids of a row.
        vocabulary: width of the output head.
        ids: how many of them can be sampled.
    """
    sequences, b = workload.prompts_per_batch * workload.group_size, BYTES[workload.dtype]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    each = 2 * config.num_hidden_layers * heads * _head_dim(config) * b
    distribution = sequences * (vocabulary * b + (FP32 + 4 * 8) * ids)
    formula = f"{sequences} rows x {length} ids x {each} bytes"
    return [
        MemoryPart("key-value cache", "sampling", sequences * length * each, formula),
        MemoryPart("sampling distribution", "sampling", distribution, "one step's logits, fp64 sums"),
    ]


def backward_parts(
    training: TrainingEstimate,
    config: Any,
    length: int,
    tokens: int,
    ids: int,
    *,
    norms: int = 2,
    whole_logits: bool = False,
) -> list[MemoryPart]:
    """Return what a transformer's microbatch keeps for its backward pass, and the largest step of that pass.

    Args:
        config: of the transformer.
        length: ids of a row.
        tokens: how many of them are scored.
        ids: how many ids can be sampled.
        norms: of a layer.
        whole_logits: all logits are computed at once, because another operation follows the output head.
    """
    rows, b, h, lora = training.workload.micro_batch_size, training.b, config.hidden_size, training.choice.lora
    # GPT-2's family leaves out the MLP's width where it is four times the hidden size.
    names = ("intermediate_size", "n_inner", "ffn_dim")
    m = next((getattr(config, name) for name in names if getattr(config, name, None)), 4 * h)
    d, heads = config.num_attention_heads * _head_dim(config), config.num_attention_heads
    # A layer keeps, per token: fp32 inputs of norms; queries, outputs, keys and values repeated for every head; both
    # halves of the MLP and the activated gate; the mask. Adapters keep the inputs of their layers in fp32; in half
    # precision each makes its own copy, and the MLP's halves pass its backward pass in fp32.
    layer = norms * FP32 * (h + 1) + 4 * d * b + FP32 * heads + 3 * m * b + length * b
    if lora is None:
        layer += (2 * h + d + m) * b + norms * h * b
        step = 5 * m * b
    else:
        layer += FP32 * ((2 if b == FP32 else 4) * h + d + m + 6 * lora.rank)
        step = 2 * m * (b + 2 * FP32)
    checkpointed = training.choice.gradient_checkpointing
    # Checkpointing keeps each layer's input and computes one layer at a time again (arXiv:1604.06174).
    kept = rows * length * (config.num_hidden_layers * (h * b if checkpointed else layer) + FP32 * h + length)
    at_work = rows * length * (step + (layer if checkpointed else 0))
    scored = rows * tokens
    # fp32 log-probs with two gradients, entropies and a stored support: 26 bytes for each id of a chunk of tokens.
    chunk = min(scored, CHUNK_TOKENS) * 26 * ids
    if lora is None:
        chunk = max(chunk + ids * h * b, 3 * ids * h * b)  # the head's gradient
    logits = 3 * scored * h * b + chunk + (2 * scored * ids * b if whole_logits else 0)
    which = "each layer's input" if checkpointed else "every layer's"
    step_formula = f"one layer, or log-probs of {min(scored, CHUNK_TOKENS)} of {scored} tokens"
    return [
        MemoryPart("activations", "backward", kept, f"{rows} rows x {length} ids: {which}"),
        MemoryPart("backward pass at work", "backward", max(at_work, logits), step_formula),
    ]


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
