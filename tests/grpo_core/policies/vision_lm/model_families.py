"""What docs/vision.md says of each family, measured on small models, and configurations of released sizes.

`python -m tests.grpo_core.policies.vision_lm.model_families` writes the table and the page.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

from grpo_core.policies.vision_lm.loading import with_template
from grpo_core.policies.vision_lm.prompts import image_sizes
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from tests.grpo_core.policies.vision_lm.tiny_families import (
    KINDS,
    NEEDS_IMAGES,
    OTHERS,
    build,
    difference,
    drawn,
    make_policy,
    plain_logprobs,
)

TABLE = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[4] / "docs" / "vision.md"

_MODELS = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "glm4v": "GLM-4.1V",
    "idefics3": "Idefics3",
    "smolvlm": "SmolVLM, SmolVLM2 (`uv pip install num2words`)",
    "gemma3": "Gemma 3",
    "internvl": "InternVL3 (the `-hf` folders)",
    "llava": "LLaVA 1.5",
    "llava_onevision": "LLaVA-OneVision",
    "paligemma": "PaliGemma",
    "mistral3": "Mistral Small 3.1",
}


@torch.no_grad()
def describe(kind: str) -> dict[str, Any]:
    """What was measured for a family; differences in nats."""
    policy = make_policy(kind)
    sampled = drawn(policy, kind)
    actions = sampled.actions
    largest = difference(policy, sampled)
    for row in range(len(actions)):
        plain = plain_logprobs(policy, actions, row)
        largest = max(largest, float((plain - sampled.rollout_logprobs[row, : len(plain)]).abs().max()))
    count = len(actions) // 3
    others = tuple(images for images in OTHERS[:count] for _ in range(3))
    try:
        image_sizes(policy.processor, VisionLMSettings(max_pixels=10_000))
        bounds = True
    except ValueError:
        bounds = False
    decoder = policy._model.get_decoder()
    return {
        "difference": largest,
        "other_image": difference(policy, sampled, others),
        "language_model": _name(policy._model, decoder),
        "text_alone": kind not in NEEDS_IMAGES,
        "max_pixels": bounds,
    }


def _name(model: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)


def page(table: Mapping[str, Mapping[str, Any]]) -> str:
    """docs/vision.md."""
    rows = "\n".join(
        f"| {_MODELS[kind]} | `{kind}` | {found['difference']:.1e} | {found['other_image']:.2f} | "
        f"`{found['language_model']}` | {'yes' if found['max_pixels'] else 'no'} | "
        f"{'yes' if found['text_alone'] else 'no'} |"
        for kind, found in table.items()
    )
    return f"""# Vision-language models

`policy.kind: vision_lm` trains an `AutoModelForImageTextToText` of transformers on prompts with images.

    policy:
      kind: vision_lm
      model: Qwen/Qwen2.5-VL-7B-Instruct
      freeze_vision: true          # train the language model alone (the default)
    rollout:
      max_completion_length: 256
      max_pixels: 501760           # larger images are scaled down

## Prompts

In a plain prompt, images replace the marks `<image>`; without marks they come before the text. A conversation has a
block `{{"type": "image"}}` for each image; without blocks, images come before the first text of the user. The number of
marks or blocks must be that of the images. A prompt that is too long for the model's context, images included, is
refused.

Each prompt is processed alone. While the image encoder and its projector are frozen, the features of a prompt's images
are computed once and shared by its samples, by all passes of an update and by the reference. Features of the most
recent prompts stay in CPU memory, up to 4 GiB. With `freeze_vision: false` they are computed in each pass, with
gradients.

Image tokens are never sampled: they have probability 0.

With `rollout.engine: vllm` a server samples prompts with images: [engines.md](engines.md).

## Training

With `policy.lora` and frozen vision, the linear layers of the language model get adapters. `policy.lora.targets` that
match a layer of the encoder are refused, unless `freeze_vision` is false; then the default is peft's `all-linear`,
which excludes the output head. Without adapters, `freeze_vision` freezes every weight outside the language model and
its head.

`rollout.min_pixels` and `max_pixels` bound the number of pixels of an image, where the image processor scales images to
an area (its own `size` of `shortest_edge` and `longest_edge`). For other processors these settings are refused, and the
message shows their size; change it in the model's `preprocessor_config.json`.

## What a model needs

`grpo doctor` and the start of a run try a model before any weights are read. A copy with random weights and a few
narrow layers samples and scores prompts with images of two sizes, and one without images. Its log-probs must be those
of a plain forward pass over the pixels, and another image must change them: a model that ignores its images would pass
every comparison of log-probs. If no small copy can be built, the run tries the model with its own weights. A model
that fails is refused with the reason. It needs:

- placeholders: ids that the features of an image replace (`image_token_id`);
- a forward pass that takes features in place of pixels (`mm_encoder_outputs`);
- a cache that the samples of a prompt can share, and explicit positions;
- a language model of its own (`get_decoder`), for frozen vision.

## Families that were tried

These are small models of transformers 5.23.0 with random weights, in fp32 on a CPU. The prompts have images of
different sizes; one has two images, one has none. "Difference" is the largest one, in nats, between the log-probs
recorded while sampling and those of the update and of a plain forward pass. "Another image" is how far log-probs move
when every image is replaced by another of the same size. Neither bf16 nor GPUs have been compared.

| models | type | difference | another image | language model | max_pixels | prompts without images |
|---|---|---|---|---|---|---|
{rows}
"""


_RELEASED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen2_vl": (
        {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
        {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4},
    ),
    "qwen2_5_vl": (
        {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
        {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ),
    "qwen3_vl": (
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128},
        {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    "glm4v": (
        {"hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32},
        {
            "depth": 24,
            "hidden_size": 1536,
            "intermediate_size": 13696,
            "num_heads": 12,
            "out_hidden_size": 4096,
            "image_size": 336,
        },
    ),
    "idefics3": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8},
        {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    ),
    "smolvlm": (
        {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15}
        | {"num_key_value_heads": 5},
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    ),
    "gemma3": (
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(34)],
        },
        {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    ),
    "internvl": (
        {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    ),
    "llava": (
        {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 32},
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    ),
    "llava_onevision": (
        {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
        {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16},
    ),
    "paligemma": (
        {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8}
        | {"num_key_value_heads": 1, "head_dim": 256},
        {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    ),
    "mistral3": (
        {"hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128},
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"head_dim": 64},
    ),
}
"""Widths and depths of a released model's language model and image encoder. Images keep the small models' sizes."""


def released(kind: str) -> tuple[Any, Any]:
    """The family's configuration with the widths and depths of a released model, and the small model's processor."""
    config, processor = build(kind)
    values = config.to_dict()
    text, vision = _RELEASED[kind]
    name = next(each for each in values if getattr(config, each, None) is config.get_text_config())
    rope = values[name].get("rope_parameters") or {}
    if "mrope_section" in rope:
        # GLM turns half of each head.
        turned = {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5} if kind == "glm4v" else None
        text = {**text, "rope_parameters": {**rope, **(turned or {"mrope_section": [16, 24, 24]})}}
    values[name].pop("layer_types", None)
    values[name] |= text
    values["vision_config"] = {**values["vision_config"], **vision}
    if kind == "paligemma":
        values |= dict.fromkeys(("hidden_size", "projection_dim"), text["hidden_size"])
    return type(config).from_dict(values), with_template(processor)


def main() -> None:
    """Write the table and the page."""
    hf.logging.set_verbosity_error()
    torch.set_num_threads(1)
    table = {}
    for kind in KINDS:
        table[kind] = describe(kind)
        print(kind, table[kind], flush=True)
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(found)}" for kind, found in table.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n")
    PAGE.write_text(page(table))


if __name__ == "__main__":
    main()
