"""The lists of the pages, as the code sees them: types of language models, families that read images, pipelines.

`python -m tests.grpo_core.policies.test_lists` measures them, and writes the tables beside this file and the pages.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.loading import matrices_without_adapter, train_language_model
from grpo_core.policies.causal_lm.model_types import REFUSED, TRIED, refuse_known
from grpo_core.policies.causal_lm.model_types import TRIED as TYPES
from grpo_core.policies.diffusers.accepted_pipelines import TRIED as TRIED_CLASSES
from grpo_core.policies.diffusers.accepted_pipelines import find_pipeline_class
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.policies.vision_lm.prompts import image_sizes
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from tests.grpo_core.policies.causal_lm.model_types import configurations, small_model
from tests.grpo_core.policies.vision_lm.tiny_families import (
    KINDS,
    NEEDS_IMAGES,
    OTHERS,
    difference,
    drawn,
    make_policy,
    plain_logprobs,
)

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {"types": DOCS / "models.md", "families": DOCS / "models.md", "classes": DOCS / "denoising.md"}
CLASSES = tuple(sorted({name for name in dir(diffusers) if name.endswith("Pipeline")}))
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


def table_file(name: str) -> Path:
    """Where the table of a list stands."""
    return Path(__file__).with_name(f"{name}.json")


def read_table(name: str) -> dict[str, Any]:
    """The table as it was measured."""
    found: dict[str, Any] = json.loads(table_file(name).read_text())
    return found


def left_out(model_type: str) -> list[str]:
    """The matrices that adapters on all linear layers leave out."""
    model = small_model(model_type)
    train_language_model(model, TrainingChoice(LoraSettings(rank=2, alpha=4.0)), base_name="")
    return sorted(matrices_without_adapter(model))


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
    others = tuple(images for images in OTHERS[: len(actions) // 3] for _ in range(3))
    try:
        image_sizes(policy.processor, VisionLMSettings(max_pixels=10_000))
        bounds = True
    except ValueError:
        bounds = False
    decoder = policy._model.get_decoder()
    return {
        "difference": largest,
        "other_image": difference(policy, sampled, others),
        "language_model": next(name for name, module in policy._model.named_modules() if module is decoder),
        "text_alone": kind not in NEEDS_IMAGES,
        "max_pixels": bounds,
    }


def outcome(name: str) -> str | None:
    """`tried`, `expected`, or the reason why it is refused; None for what is no pipeline of images, such as ONNX's."""
    described = find_pipeline_class(name)
    if described is None:
        return None
    return "tried" if name in TRIED_CLASSES else described.problem or "expected"


def measure(name: str) -> dict[str, Any]:
    """The table of a list, measured now."""
    if name == "families":
        return {kind: describe(kind) for kind in KINDS}
    if name == "types":
        found = {each: names for each in sorted(TRIED) if (names := left_out(each))}
        return {"refused": refused_types(), "left_out": found}
    return {each: found for each in CLASSES if (found := outcome(each)) is not None}


def section(name: str) -> str:
    """The list's section of its page."""
    return f"<!-- {name}: begin -->\n{_SECTIONS[name](read_table(name))}\n<!-- {name}: end -->"


def _types(table: Mapping[str, Any]) -> str:
    refused = table["refused"]
    others = [each for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if each not in TRIED and each not in refused]
    return f"""Tried with random weights ({len(TRIED)} types of transformers {transformers.__version__}):

{", ".join(sorted(TRIED))}

Refused ({len(refused)}): {", ".join(refused)}

Not tried ({len(others)}): {", ".join(sorted(others))}"""


def refused_types() -> list[str]:
    """The types that are refused by their names or configurations."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _is_refused(name))


def _is_refused(model_type: str) -> bool:
    if model_type in REFUSED:
        return True
    try:
        for config in configurations(model_type)[:1]:
            refuse_known("", config)
    except InputError:
        return True
    return False


def _families(table: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f"| {_MODELS[kind]} | `{kind}` | {found['difference']:.1e} | {found['other_image']:.2f} | "
        f"`{found['language_model']}` | {'yes' if found['max_pixels'] else 'no'} | "
        f"{'yes' if found['text_alone'] else 'no'} |"
        for kind, found in table.items()
    )
    return f"""| models | type | difference | another image | language model | max_pixels | prompts without images |
|---|---|---|---|---|---|---|
{rows}"""


def _classes(table: Mapping[str, Any]) -> str:
    tried, expected = ([name for name, found in table.items() if found == kind] for kind in ("tried", "expected"))
    return f"""Tried with random weights ({len(tried)}):

{", ".join(tried)}

Expected to fit, by their signatures ({len(expected)}):

{", ".join(expected)}"""


_SECTIONS = {"types": _types, "families": _families, "classes": _classes}


def main() -> None:
    """Write the tables and their sections of the pages."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name, page in PAGES.items():
        lines = ",\n".join(f"{json.dumps(each)}: {json.dumps(found)}" for each, found in measure(name).items())
        table_file(name).write_text(f"{{\n{lines}\n}}\n")
        marks = rf"<!-- {name}: begin -->.*<!-- {name}: end -->"
        page.write_text(re.sub(marks, lambda _, name=name: section(name), page.read_text(), flags=re.DOTALL))


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_show_the_lists(name: str) -> None:
    assert section(name) in PAGES[name].read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(TYPES))
def test_a_type_leaves_out_what_the_table_says(model_type: str) -> None:
    assert left_out(model_type) == read_table("types")["left_out"].get(model_type, [])


@pytest.mark.slow
def test_types_are_refused_as_the_table_says() -> None:
    assert refused_types() == read_table("types")["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_is_what_the_table_says(kind: str) -> None:
    found, expected = describe(kind), read_table("families")[kind]
    assert found["difference"] < 1e-5
    assert {**found, "difference": 0, "other_image": 0} == {**expected, "difference": 0, "other_image": 0}


# One of each list, and one for each reason.
QUICK = (
    *("FluxPipeline", "PRXPipeline", "PixArtSigmaPipeline", "OmniGenPipeline", "StableDiffusionXLPipeline"),
    *("FluxImg2ImgPipeline", "FluxFillPipeline", "WanPipeline", "GlmImagePipeline", "HunyuanImagePipeline"),
    *("Kandinsky5T2IPipeline", "StableAudio3Pipeline"),
)


@pytest.mark.parametrize("name", QUICK)
def test_a_class_is_what_the_table_says(name: str) -> None:
    assert outcome(name) == read_table("classes")[name]


@pytest.mark.slow
def test_every_class_is_what_the_table_says() -> None:
    assert measure("classes") == read_table("classes")


def test_classes_that_are_called_tried() -> None:
    assert {name for name, each in read_table("classes").items() if each == "tried"} == set(TRIED_CLASSES)


if __name__ == "__main__":
    main()
