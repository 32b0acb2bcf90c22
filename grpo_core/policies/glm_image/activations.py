"""Bytes of the tensors that sampling, updating and decoding make beside the weights, each from its shapes.

Written for transformers' GlmImageTextDecoderLayer under scaled_dot_product_attention with a mask, peft's LoRA layers
and diffusers' AutoencoderKL. Symbols: b bytes of the model's dtype, h hidden, m intermediate, d heads x head_dim,
r adapter rank, V columns of the output head, S image codes, L ids of a row, T of them sampled.
"""

from grpo_core.logprobs import CHUNK_TOKENS
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


def kept_bytes(sizes: ComponentSizes, b: int, *, rows: int, length: int, checkpointed: bool) -> int:
    """Activations that a microbatch keeps from its forward pass for its backward pass.

    Without checkpointing each layer keeps its own and the mask in the model's dtype: layers * rows L (saved + L b).
    With it (Chen et al., 2016, arXiv:1604.06174) each layer keeps its input alone: layers * rows L h b. The mask
    itself takes rows L^2, the last norm's input 4 rows L h.
    """
    each = sizes.hidden * b if checkpointed else saved_bytes_per_token(sizes, b) + length * b
    return rows * length * (sizes.layers * each + FP32 * sizes.hidden + length)


def layer_bytes(sizes: ComponentSizes, b: int, *, rows: int, length: int, checkpointed: bool) -> int:
    """What the layer whose backward pass runs holds beside what was kept: rows L working.

    With checkpointing it has been computed again: rows L (saved + L b) more.
    """
    again = saved_bytes_per_token(sizes, b) + length * b if checkpointed else 0
    return rows * length * (working_bytes_per_token(sizes, b) + again)


def logits_bytes(
    sizes: ComponentSizes, b: int, *, rows: int, tokens: int, entropy: bool = True, truncated: bool = True
) -> int:
    """Hidden states of the scored tokens, and the logits of one chunk of them, at the peak of its backward pass.

    rows T 3 h b: the states, the chunks' gradients and these put together. For each of the c tokens of a chunk 12 S:
    fp32 log-probs and two gradients. With entropies 9 S more: their exponential, a copy without infinities and its
    mask of one byte; with a stored support 5 S: the log-probs before the cut, and a mask. A head that is trained
    holds the gradient of the chunks before, S h b, and at the end pads it: (2 S + V) h b at least.
    """
    h, support = sizes.hidden, sizes.support
    each = 3 * FP32 + (2 * FP32 + 1 if entropy else 0) + (FP32 + 1 if truncated else 0)
    chunk = min(rows * tokens, CHUNK_TOKENS) * each * support
    if not sizes.adapter:
        chunk = max(chunk + support * h * b, (2 * support + sizes.vocabulary) * h * b)
    return rows * tokens * 3 * h * b + chunk


def sampling_bytes(sizes: ComponentSizes, b: int, *, rows: int) -> int:
    """One step's logits and the distribution drawn from: rows (V b + (4 + 4 * 8) S), fp32 and then fp64.

    Cutting the distribution takes no more than drawing from it.
    """
    return rows * (sizes.vocabulary * b + (FP32 + 4 * 8) * sizes.support)


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
