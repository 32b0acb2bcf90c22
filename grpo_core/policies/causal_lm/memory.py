"""An estimate of the GPU memory that a configuration needs, part by part, before anything is loaded.

Weights, adapters, optimizer state and key-value cache are counted on the model built without memory. Activations
follow a layer with two norms and a gated MLP, which most of today's models have; for others they are a guess of the
right size. Symbols: b bytes of the dtype, h hidden, m intermediate, d heads x head_dim, V columns of the output head.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from grpo_core.logprobs import CHUNK_TOKENS
from grpo_core.policies.causal_lm.training import train_causal_lm
from grpo_core.policies.estimate import BYTES, GIB, MemoryEstimate, MemoryPart, count_parameters
from grpo_core.policies.trained import LoraSettings, TrainingChoice

_FP32, _FP64 = 4, 8
# Names under which configurations say that something follows the output head.
_AFTER_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass(frozen=True)
class CausalLMSizes:
    """Parameter counts and widths.

    Attributes:
        parameters: of the model, shared ones once.
        adapter: of the adapters; 0 without.
        layers: of the model; so are the next six.
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        heads: of queries.
        key_value_heads: of keys and values.
        head_dim: of one head.
        vocabulary: columns of the output head.
        whole_logits: something follows the head, so that logits of a whole microbatch are made.
    """

    parameters: int
    adapter: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    whole_logits: bool


def model_sizes(config: Any, *, lora_rank: int | None = None, lora_targets: str | None = None) -> CausalLMSizes:
    """Count a model's parameters and those of its adapters, by peft's own choice of layers.

    Args:
        config: from `grpo_core.policies.causal_lm.loading.read_config`.
        lora_rank: None trains every weight.
        lora_targets: as in LoraSettings.

    Raises:
        InputError: the targets match no layer.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        parameters = count_parameters(model)
        adapter = 0
        if lora_rank is not None:
            choice = TrainingChoice(lora=LoraSettings(lora_rank, 1.0, lora_targets))
            trained = train_causal_lm(model, choice, base_name="")
            adapter = sum(part.numel() for part in trained.trainable_parameters().values())
    text = config.get_text_config()
    hidden, heads = text.hidden_size, text.num_attention_heads
    return CausalLMSizes(
        parameters=parameters,
        adapter=adapter,
        layers=text.num_hidden_layers,
        hidden=hidden,
        intermediate=_widest(text),
        heads=heads,
        key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        vocabulary=text.vocab_size,
        whole_logits=any(getattr(text, name, None) not in (None, 1, 1.0) for name in _AFTER_HEAD),
    )


def _widest(text: Any) -> int:
    """The MLP's width; GPT-2's family leaves it out where it is four times the stream's."""
    for name in ("intermediate_size", "n_inner", "ffn_dim"):
        if getattr(text, name, None):
            return int(getattr(text, name))
    return 4 * int(text.hidden_size)


def estimate_memory(
    sizes: CausalLMSizes,
    *,
    dtype: Literal["float32", "bfloat16"],
    max_completion_length: int,
    group_size: int,
    prompts_per_batch: int,
    micro_batch_size: int,
    reference_on_device: bool = False,
    gradient_checkpointing: bool = False,
    eight_bit_optimizer: bool = False,
    prompt_tokens: int = 512,
    device_overhead: int = GIB,
) -> MemoryEstimate:
    """Estimate the memory of a rollout and an update.

    Args:
        sizes: of the model and its adapters.
        dtype: of the weights.
        max_completion_length: tokens of a completion.
        group_size: completions a prompt.
        prompts_per_batch: prompts sampled at once.
        micro_batch_size: rows of a forward and backward pass.
        reference_on_device: every weight is trained and a frozen copy is kept on the GPU.
        gradient_checkpointing: recompute activations in the backward pass.
        eight_bit_optimizer: moments take a byte each.
        prompt_tokens: ids of the longest prompt of a batch.
        device_overhead: bytes of the CUDA context and the libraries' own buffers.
    """
    b = BYTES[dtype]
    # The last sampled token is never fed back.
    length = prompt_tokens + max_completion_length - 1
    sequences = prompts_per_batch * group_size
    each = 2 * sizes.layers * sizes.key_value_heads * sizes.head_dim * b
    parts = [
        MemoryPart("weights", "always", sizes.parameters * b, f"{sizes.parameters / 1e9:.3g} B parameters x {b} bytes"),
        MemoryPart("device overhead", "always", device_overhead, "CUDA context and the libraries' own buffers"),
        *_training_parts(sizes, b, reference=reference_on_device, moment=1 if eight_bit_optimizer else None),
        MemoryPart(
            "key-value cache", "sampling", sequences * length * each, f"{sequences} rows x {length} ids x {each} bytes"
        ),
        MemoryPart(
            "sampling distribution",
            "sampling",
            sequences * sizes.vocabulary * (b + _FP32 + 3 * _FP64),
            f"{sequences} rows x {sizes.vocabulary} ids: one step's logits, fp64 sums",
        ),
        _activations(sizes, b, rows=micro_batch_size, length=length, checkpointed=gradient_checkpointing),
        _logits(sizes, b, rows=micro_batch_size, tokens=max_completion_length),
    ]
    return MemoryEstimate(tuple(part for part in parts if part.bytes))


def checkpoint_bytes(sizes: CausalLMSizes, dtype: Literal["float32", "bfloat16"]) -> int:
    """What a policy version takes on disk: what is trained and AdamW's two moments of it."""
    return 3 * sizes.adapter * _FP32 if sizes.adapter else 3 * sizes.parameters * BYTES[dtype]


def _training_parts(sizes: CausalLMSizes, b: int, *, reference: bool, moment: int | None) -> list[MemoryPart]:
    """What training adds; peft keeps adapters in fp32 whatever the model's dtype."""
    if sizes.adapter:
        count, each = sizes.adapter, _FP32
        what = f"{count / 1e6:.3g} M adapter parameters in fp32"
        held = MemoryPart("adapters", "always", count * each, what)
    else:
        count, each = sizes.parameters, b
        what = f"{count / 1e9:.3g} B trained parameters x {b} bytes"
        held = MemoryPart("reference model", "always", count * each if reference else 0, "a frozen copy of the model")
    moments = moment or each
    return [
        held,
        MemoryPart("gradients", "update", count * each, what),
        MemoryPart("optimizer moments", "update", 2 * count * moments, f"2 x {count} moments x {moments} bytes"),
        MemoryPart("optimizer temporaries", "optimizer step", count * each, what),
    ]


def _activations(sizes: CausalLMSizes, b: int, *, rows: int, length: int, checkpointed: bool) -> MemoryPart:
    """Each layer's own, or with checkpointing each layer's input and one layer's own.

    Two norms keep their inputs in fp32, 8 h; attention queries, keys, values for every head and outputs, 4 d b; the
    MLP 3 m b; the linear layers their inputs, (2 h + d + m) b. The backward pass of one MLP holds 5 m b more.
    """
    h, m, d = sizes.hidden, sizes.intermediate, sizes.heads * sizes.head_dim
    saved = 2 * _FP32 * h + 4 * d * b + 3 * m * b + (2 * h + d + m) * b
    per_token = (saved + sizes.layers * h * b if checkpointed else sizes.layers * saved) + 5 * m * b
    kept = "each layer's input, one layer computed again" if checkpointed else "every layer's"
    return MemoryPart("activations", "backward", rows * length * per_token, f"{rows} rows x {length} ids: {kept}")


def _logits(sizes: CausalLMSizes, b: int, *, rows: int, tokens: int) -> MemoryPart:
    """One chunk's logits with fp32 log-probs, probabilities and their gradients; whole logits twice where needed."""
    scored = rows * tokens
    chunk = min(scored, CHUNK_TOKENS) * sizes.vocabulary * (b + 4 * _FP32)
    whole = 2 * scored * sizes.vocabulary * b if sizes.whole_logits else 0
    what = f"{min(scored, CHUNK_TOKENS)} tokens at a time" + (f", logits of all {scored}" if whole else "")
    return MemoryPart("logits", "backward", chunk + whole, what)
