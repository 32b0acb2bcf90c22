"""An estimate of the GPU memory that a configuration needs, part by part, before anything is loaded.

Weights, adapters, optimizer state and key-value cache are exact. Activations follow the formulas of `activations`;
peaks of the whole are meant to be right within ERROR_MARGIN: kernels' workspaces and the caching allocator's
fragmentation are in the margin, not in the parts. Nothing was compared with a GPU running the released weights;
its publisher's figures for drawing (34 to 52 GB) agree.
"""

from dataclasses import dataclass
from typing import Literal

from grpo_core.policies.glm_image.activations import (
    FP32,
    activation_bytes,
    cache_bytes_per_token,
    denoising_bytes,
    logits_bytes,
    sampling_bytes,
    vae_bytes,
)
from grpo_core.policies.glm_image.geometry import token_grids
from grpo_core.policies.glm_image.sizes import ComponentSizes

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


def estimate_memory(
    sizes: ComponentSizes,
    *,
    dtype: Literal["float32", "bfloat16", "float16"],
    height: int,
    width: int,
    group_size: int,
    prompts_per_batch: int,
    decode_batch_size: int,
    micro_batch_size: int,
    kl_coef: float = 0.0,
    gradient_checkpointing: bool = False,
    prompt_tokens: int = 256,
    device_overhead: int = GIB,
) -> MemoryEstimate:
    """Estimate the memory of a rollout and an update.

    Args:
        sizes: of the model and its adapters.
        dtype: of the weights.
        height: pixels.
        width: pixels.
        group_size: pictures a prompt.
        prompts_per_batch: prompts sampled at once.
        decode_batch_size: pictures decoded at once, at most; siblings only.
        micro_batch_size: rows of a forward and backward pass.
        kl_coef: above 0 a reference is run, and a full fine-tuning keeps a copy of the model for it.
        gradient_checkpointing: recompute activations in the backward pass.
        prompt_tokens: ids of the longest prompt of a batch, grid tags included.
        device_overhead: bytes of the CUDA context and the libraries' own buffers.

    Raises:
        InputError: a size that the model cannot draw.
    """
    b = BYTES[dtype]
    tokens = token_grids(height, width, sizes.unit).tokens
    # The last sampled token is never fed back.
    length = prompt_tokens + tokens - 1
    sequences, decoded = prompts_per_batch * group_size, min(decode_batch_size, group_size)
    size = f"{height}x{width}"
    cache = sequences * length * cache_bytes_per_token(sizes, b)
    activations = activation_bytes(sizes, b, rows=micro_batch_size, length=length, checkpointed=gradient_checkpointing)
    logits = logits_bytes(sizes, b, rows=micro_batch_size, tokens=tokens, reference=kl_coef > 0)
    kept = "each layer's input, one layer computed again" if gradient_checkpointing else "every layer's"
    parts = [
        *_weight_parts(sizes, dtype),
        *_training_parts(sizes, b, keep_reference=kl_coef > 0),
        MemoryPart("device overhead", "always", device_overhead, "CUDA context and the libraries' own buffers"),
        MemoryPart(
            "key-value cache",
            "sampling",
            cache,
            f"{sequences} rows x {length} ids x {cache_bytes_per_token(sizes, b)} bytes",
        ),
        MemoryPart(
            "sampling distribution",
            "sampling",
            sampling_bytes(sizes, b, rows=sequences),
            "one step's logits, fp64 sums",
        ),
        MemoryPart(
            "decoding",
            "decoding",
            max(
                denoising_bytes(sizes, b, rows=decoded, height=height, width=width),
                vae_bytes(sizes, b, rows=1, height=height, width=width),
            ),
            f"{size}: a decoder block for {decoded} pictures, or the autoencoder's widest tensors for one",
        ),
        MemoryPart("activations", "backward", activations, f"{micro_batch_size} rows x {length} ids: {kept}"),
        MemoryPart(
            "logits", "backward", logits, f"{micro_batch_size} rows x {tokens} tokens: logits and their fp32 log-probs"
        ),
    ]
    return MemoryEstimate(tuple(part for part in parts if part.bytes))


def checkpoint_bytes(sizes: ComponentSizes, dtype: Literal["float32", "bfloat16", "float16"]) -> int:
    """What a policy version takes on disk: weights and AdamW's two moments.

    Adapters alone where there are some, in fp32; else the whole token model with moments of what is trained.
    """
    if sizes.adapter:
        return 3 * sizes.adapter * FP32
    return (sizes.autoregressive + 2 * sizes.language_model) * BYTES[dtype]


def _weight_parts(sizes: ComponentSizes, dtype: str) -> list[MemoryPart]:
    b = BYTES[dtype]
    # transformers keeps some of T5's layers in fp32 when fp16 is asked for, because they overflow.
    extra = (FP32 - b) * sizes.text_encoder_fp32 if dtype == "float16" else 0
    counts = {
        "autoregressive weights": (sizes.autoregressive, 0),
        "decoder weights": (sizes.decoder, 0),
        "autoencoder weights": (sizes.vae, 0),
        "glyph encoder weights": (sizes.text_encoder, extra),
    }
    return [
        MemoryPart(name, "always", count * b + more, f"{count / 1e9:.3g} B parameters x {b} bytes")
        for name, (count, more) in counts.items()
    ]


def _training_parts(sizes: ComponentSizes, b: int, *, keep_reference: bool) -> list[MemoryPart]:
    """What training adds; AdamW keeps two moments of the parameters' own dtype.

    peft keeps adapters in fp32 whatever the model's dtype. AdamW's multi-tensor step makes one more tensor for each
    parameter.
    """
    if sizes.adapter:
        count, each = sizes.adapter, FP32
        what = f"{count / 1e6:.3g} M adapter parameters in fp32"
        held = [
            MemoryPart("adapters", "always", count * each, what),
        ]
    else:
        count, each = sizes.language_model, b
        what = f"{count / 1e9:.3g} B trained parameters x {b} bytes"
        copied = sizes.autoregressive * b if keep_reference else 0
        held = [MemoryPart("reference model", "always", copied, "a frozen copy of the autoregressive model")]
    return [
        *held,
        MemoryPart("gradients", "update", count * each, what),
        MemoryPart("optimizer moments", "update", 2 * count * each, f"2 x {what}"),
        MemoryPart("optimizer temporaries", "optimizer step", count * each, what),
    ]
