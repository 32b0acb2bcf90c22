"""Bytes of the tensors that sampling, updating and decoding make beside the weights, each from its shapes.

Written for transformers' GlmImageTextDecoderLayer under scaled_dot_product_attention with a mask, peft's LoRA layers
and diffusers' AutoencoderKL. Symbols: b bytes of the model's dtype, h hidden, m intermediate, d heads x head_dim,
r adapter rank, V columns of the output head, S ids that can be sampled, L ids of a row, T of them sampled.
"""

from grpo_core.policies.glm_image.geometry import token_grids
from grpo_core.policies.glm_image.sizes import ComponentSizes

FP32 = 4
_DENOISING_COPIES = 16
_VAE_COPIES = 4


def cache_bytes_per_token(sizes: ComponentSizes, b: int) -> int:
    """Key and value of one token in every layer: 2 * layers * key_value_heads * head_dim * b."""
    return 2 * sizes.layers * sizes.key_value_heads * sizes.head_dim * b


def saved_bytes_per_token(sizes: ComponentSizes, b: int) -> int:
    """What one layer keeps of a token for its backward pass, the mask aside.

    Each of four norms keeps its input in fp32 and one scale, 4 (4 h + 4); attention keeps queries, outputs and the
    keys and values repeated for every query head, 4 d b, and a log-sum for each head, 4 heads; the gated MLP keeps
    both halves and the activated gate, 3 m b. A linear layer with an adapter keeps its input and the projected input
    in fp32, 4 (in + r): in half precision each adapter has a copy of its own, in fp32 queries, keys and values share
    theirs. Without adapters the linear layers keep their inputs, (2 h + d + m) b, and the norms what they scale, 4 h b.
    """
    h, m, d = sizes.hidden, sizes.intermediate, sizes.heads * sizes.head_dim
    kept = 4 * (FP32 * h + FP32) + 4 * d * b + FP32 * sizes.heads + 3 * m * b
    if not sizes.adapter:
        return kept + (2 * h + d + m) * b + 4 * h * b
    inputs = {"q_proj": h, "k_proj": h, "v_proj": h, "o_proj": d, "gate_up_proj": h, "down_proj": m}
    copied = set(sizes.adapted)
    if b == FP32 and copied & {"q_proj", "k_proj", "v_proj"}:
        copied = copied - {"k_proj", "v_proj"} | {"q_proj"}
    return kept + FP32 * (sum(inputs[name] for name in copied) + sizes.adapter_rank * len(sizes.adapted))


def working_bytes_per_token(sizes: ComponentSizes, b: int) -> int:
    """The most that one layer holds of a token beside what it keeps, in the MLP's backward pass.

    With adapters the gate and up projections pass through fp32: 2 m values in b and twice in fp32, 2 m (b + 8).
    Without, the gradients of both halves, of the gate and of the product, 5 m b.
    """
    m = sizes.intermediate
    return 2 * m * (b + 2 * FP32) if sizes.adapter else 5 * m * b


def activation_bytes(sizes: ComponentSizes, b: int, *, rows: int, length: int, checkpointed: bool) -> int:
    """A microbatch's activations at their peak.

    Without checkpointing each layer keeps its own: rows L (layers * saved + working). With it (Chen et al., 2016,
    arXiv:1604.06174) each layer keeps its input alone and one layer at a time is computed again:
    rows L (layers * h b + saved + working). Each layer that keeps its own also keeps the mask in the model's dtype,
    rows L^2 b; the mask itself takes rows L^2, the last norm's input 4 rows L h.
    """
    saved, working = saved_bytes_per_token(sizes, b), working_bytes_per_token(sizes, b)
    whole_layers = 1 if checkpointed else sizes.layers
    inputs = sizes.layers * sizes.hidden * b if checkpointed else 0
    tokens = rows * length * (whole_layers * saved + inputs + working + FP32 * sizes.hidden)
    return tokens + rows * length**2 * (1 + whole_layers * b)


def logits_bytes(sizes: ComponentSizes, b: int, *, rows: int, tokens: int, reference: bool) -> int:
    """Logits and what is made of them, at the peak.

    rows T (V b + 3 * 4 S): logits, then in fp32 the log-probs, their exponential and the product whose sum is the
    entropy. With a reference the trained model's log-probs are kept while the reference's are made: 4 S more.
    """
    return rows * tokens * (sizes.vocabulary * b + (4 if reference else 3) * FP32 * sizes.support)


def sampling_bytes(sizes: ComponentSizes, b: int, *, rows: int) -> int:
    """One step's logits and the distribution drawn from: rows (V b + (4 + 2 * 8 + 8) S), fp32 and then fp64."""
    return rows * (sizes.vocabulary * b + (FP32 + 3 * 8) * sizes.support)


def denoising_bytes(sizes: ComponentSizes, b: int, *, rows: int, height: int, width: int) -> int:
    """One block of the diffusion transformer, about 16 tensors of [rows, patches, hidden].

    Four patches a large token. The two passes of guidance are made one after the other.
    """
    patches = 4 * token_grids(height, width, sizes.unit).large.tokens
    return _DENOISING_COPIES * rows * patches * sizes.decoder_hidden * b


def vae_bytes(sizes: ComponentSizes, b: int, *, rows: int, height: int, width: int) -> int:
    """The autoencoder's widest tensors: 4 of [rows, channels, height, width] at full resolution.

    The block before the last ends with an upsampling to full resolution at its own width; the last one normalises
    and activates that before its first convolution narrows it: three tensors, and one for the convolution's workspace.
    """
    channels = sizes.vae_widths[min(1, len(sizes.vae_widths) - 1)]
    return _VAE_COPIES * rows * channels * height * width * b
