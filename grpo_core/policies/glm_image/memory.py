"""An estimate of the GPU memory that a configuration needs, part by part, before anything is loaded.

Weights, adapters, optimizer state and key-value cache are exact. Activations follow the formulas of `activations`;
peaks of the whole are meant to be right within ERROR_MARGIN: kernels' workspaces and the caching allocator's
fragmentation are in the margin, not in the parts. Nothing was compared with a GPU running the released weights;
its publisher's figures for drawing (34 to 52 GB) agree.
"""

from typing import Literal

from grpo_core.logprobs import CHUNK_TOKENS
from grpo_core.policies.estimate import BYTES, GIB, MemoryEstimate, MemoryPart
from grpo_core.policies.glm_image.activations import (
    FP32,
    cache_bytes_per_token,
    denoising_bytes,
    kept_bytes,
    layer_bytes,
    logits_bytes,
    sampling_bytes,
    vae_bytes,
)
from grpo_core.policies.glm_image.geometry import token_grids
from grpo_core.policies.glm_image.sizes import ComponentSizes


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
    reference_on_device: bool = False,
    gradient_checkpointing: bool = False,
    eight_bit_optimizer: bool = False,
    prompt_tokens: int = 256,
    device_overhead: int = GIB,
) -> MemoryEstimate:
    """Estimate the memory of a rollout and an update.

    Args:
        sizes: of the model and its adapters.
        dtype: of the weights.
        height: pixels.
        width: pixels.
        group_size: images a prompt.
        prompts_per_batch: prompts sampled at once.
        decode_batch_size: images decoded at once, at most; siblings only.
        micro_batch_size: rows of a forward and backward pass.
        reference_on_device: every weight is trained and the reference's are kept on the GPU.
        gradient_checkpointing: recompute activations in the backward pass.
        eight_bit_optimizer: moments take a byte each.
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
    checkpointed = gradient_checkpointing
    parts = [
        *_weight_parts(sizes, dtype),
        *_training_parts(sizes, b, reference=reference_on_device, eight_bit=eight_bit_optimizer),
        MemoryPart("device overhead", "always", device_overhead, "CUDA context and the libraries' own buffers"),
        *_sampling_parts(sizes, b, sequences=sequences, length=length),
        _decoding_part(sizes, b, rows=decoded, height=height, width=width),
        *_backward_parts(sizes, b, rows=micro_batch_size, length=length, tokens=tokens, checkpointed=checkpointed),
    ]
    return MemoryEstimate(tuple(part for part in parts if part.bytes))


def _sampling_parts(sizes: ComponentSizes, b: int, *, sequences: int, length: int) -> list[MemoryPart]:
    each = cache_bytes_per_token(sizes, b)
    distribution = sampling_bytes(sizes, b, rows=sequences)
    return [
        MemoryPart(
            "key-value cache", "sampling", sequences * length * each, f"{sequences} rows x {length} ids x {each} bytes"
        ),
        MemoryPart("sampling distribution", "sampling", distribution, "one step's logits, fp64 sums"),
    ]


def _decoding_part(sizes: ComponentSizes, b: int, *, rows: int, height: int, width: int) -> MemoryPart:
    widest = max(
        denoising_bytes(sizes, b, rows=rows, height=height, width=width),
        vae_bytes(sizes, b, rows=1, height=height, width=width),
    )
    what = f"{height}x{width}: a decoder block for {rows} images, or the autoencoder's widest tensors for one"
    return MemoryPart("decoding", "decoding", widest, what)


def _backward_parts(
    sizes: ComponentSizes, b: int, *, rows: int, length: int, tokens: int, checkpointed: bool
) -> list[MemoryPart]:
    kept = kept_bytes(sizes, b, rows=rows, length=length, checkpointed=checkpointed)
    layer = layer_bytes(sizes, b, rows=rows, length=length, checkpointed=checkpointed)
    logits = logits_bytes(sizes, b, rows=rows, tokens=tokens)
    scored = rows * tokens
    which = "each layer's input" if checkpointed else "every layer's"
    redone = ", computed again" if checkpointed else ""
    at_work = f"one layer{redone}, or log-probs of {min(scored, CHUNK_TOKENS)} of {scored} tokens"
    return [
        MemoryPart("activations", "backward", kept, f"{rows} rows x {length} ids: {which}"),
        MemoryPart("backward pass at work", "backward", max(layer, logits), at_work),
    ]


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


def _training_parts(sizes: ComponentSizes, b: int, *, reference: bool, eight_bit: bool) -> list[MemoryPart]:
    """What training adds; AdamW keeps two moments of the parameters' own dtype, or of 8 bits.

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
        copied = count * b if reference else 0
        held = [MemoryPart("reference model", "always", copied, "the trained parameters once more")]
    moment = 1 if eight_bit else each
    return [
        *held,
        MemoryPart("gradients", "update", count * each, what),
        MemoryPart("optimizer moments", "update", 2 * count * moment, f"2 x {count} moments x {moment} bytes"),
        MemoryPart("optimizer temporaries", "optimizer step", count * each, what),
    ]
