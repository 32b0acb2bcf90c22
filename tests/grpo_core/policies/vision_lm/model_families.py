"""What docs/models.md says of each family, measured on small models.

`python -m tests.grpo_core.policies.vision_lm.model_families` writes the table and its section of the page.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

from grpo_core.policies.vision_lm.prompts import image_sizes
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from tests.grpo_core.policies.vision_lm.tiny_families import (
    KINDS,
    NEEDS_IMAGES,
    OTHERS,
    difference,
    drawn,
    make_policy,
    plain_logprobs,
)

TABLE = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[4] / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"

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


def section(table: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of docs/models.md."""
    rows = "\n".join(
        f"| {_MODELS[kind]} | `{kind}` | {found['difference']:.1e} | {found['other_image']:.2f} | "
        f"`{found['language_model']}` | {'yes' if found['max_pixels'] else 'no'} | "
        f"{'yes' if found['text_alone'] else 'no'} |"
        for kind, found in table.items()
    )
    return f"""{BEGIN}
| models | type | difference | another image | language model | max_pixels | prompts without images |
|---|---|---|---|---|---|---|
{rows}
{END}"""


def main() -> None:
    """Write the table and the section."""
    hf.logging.set_verbosity_error()
    torch.set_num_threads(1)
    table = {}
    for kind in KINDS:
        table[kind] = describe(kind)
        print(kind, table[kind], flush=True)
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(found)}" for kind, found in table.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n")
    text = PAGE.read_text()
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    PAGE.write_text(text[:begin] + section(table) + text[end:])


if __name__ == "__main__":
    main()
