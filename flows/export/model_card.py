"""What an exported folder says of itself: its README.md, and the lines of Python that draw or answer with it."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from configs.schema import RunConfig
from configs.sections import (
    DiffusersRolloutSection,
    GlmImageRolloutSection,
    PolicySection,
    TextRolloutSection,
    VisionRolloutSection,
)
from flows.export.difference import MergedDifference
from flows.export.plan import ExportPlan
from flows.export.training_facts import heldout_table, training_facts
from grpo_core.policies.diffusers.saved_pipeline import SavedPipeline, call_settings, read_saved_pipeline
from grpo_core.policies.pipeline_files import INDEX_FILE
from grpo_core.policies.protocol import policy_family
from grpo_core.streams import Stream
from tasks.models.initial import local_source
from tasks.reports.report import Report, markdown_of

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
"""Where diffusers looks for an adapter in a folder."""

IMAGE_PROMPT, EDIT_PROMPT = "a red circle in the center on a white background", "make it dusk"
TEXT_PROMPT, QUESTION = "Write a haiku about rain.", "What is in this image?"


def usage(config: RunConfig, exported: str, *, merged: bool) -> str:
    """Return a script that draws one image, or answers one prompt.

    Args:
        config: of the run.
        exported: folder or hub name of the export.
        merged: whether the export is a model; otherwise an adapter of the run's model.
    """
    rollout = config.evaluation_rollout
    if isinstance(rollout, TextRolloutSection):
        return _text_usage(config, rollout, exported, merged)
    return _image_usage(config, rollout, exported, merged)


def _image_usage(
    config: RunConfig, rollout: GlmImageRolloutSection | DiffusersRolloutSection, exported: str, merged: bool
) -> str:
    model, pipeline = exported if merged else config.policy.model, _PIPELINES[config.policy.kind]
    own = isinstance(rollout, GlmImageRolloutSection) and _has_own_processor(config.policy.model)
    code = ", trust_remote_code=True" if own else ""
    code += _revision(config, merged)
    saved = _saved(config)
    absent = [] if saved is None else [part for part in saved.pipeline_class.can_lack if part not in saved.parts]
    code += "".join(f", {part}=None" for part in absent)
    adapters = {} if merged else {stream: _ADAPTERS[stream] for stream in config.policy.streams}
    imports = [name for stream in adapters for name in _ADAPTER_IMPORTS.get(stream, ())]
    lines = ["import torch", f"from diffusers import {pipeline}", *imports, ""]
    lines += [f'pipe = {pipeline}.from_pretrained("{model}", dtype=torch.{config.policy.dtype}{code})']
    several = len(adapters) > 1
    for stream, loading in adapters.items():
        place = f'"{exported}", subfolder="{stream}"' if several else f'"{exported}"'
        lines += [line.format(place=place) for line in loading]
    call = {name: getattr(rollout, name) for name in ("height", "width", "num_inference_steps")}
    settings = ", ".join(f"{name}={value!r}" for name, value in {**call, **_own_arguments(config, rollout)}.items())
    source = _source_argument(config)
    if source is not None:
        lines.insert(2, "from diffusers.utils import load_image")
    given = f'prompt="{IMAGE_PROMPT}"' if source is None else f'prompt="{EDIT_PROMPT}", {source}'
    lines += [f"image = pipe({given}, {settings}).images[0]", 'image.save("image.png")']
    return "\n".join(lines)


def _saved(config: RunConfig) -> SavedPipeline | None:
    return read_saved_pipeline(config.policy.model) if config.policy.kind == "diffusers" else None


def _source_argument(config: RunConfig) -> str | None:
    """Return the argument for the image to edit; None for a run whose prompts have none."""
    if not _edits(config):
        return None
    if config.policy.kind == "glm_image":
        return f"image=[{_LOAD_SOURCE}]"
    saved = _saved(config)
    argument = saved.pipeline_class.sources if saved is not None else None
    if argument is None:
        return None
    return f"image=[{_LOAD_SOURCE}]" if argument.as_list else f"image={_LOAD_SOURCE}"


_LOAD_SOURCE = 'load_image("source.png")'


_PIPELINES: Mapping[str, str] = MappingProxyType({"glm_image": "GlmImagePipeline", "diffusers": "DiffusionPipeline"})
_ADAPTER_IMPORTS: Mapping[Stream, tuple[str, ...]] = MappingProxyType({"tokens": ("from peft import PeftModel",)})
_ADAPTERS: Mapping[Stream, tuple[str, ...]] = MappingProxyType(
    {
        "tokens": (
            "adapted = PeftModel.from_pretrained(pipe.vision_language_encoder, {place})",
            "pipe.vision_language_encoder = adapted.merge_and_unload()",
        ),
        "denoising": (f'pipe.transformer.load_lora_adapter({{place}}, weight_name="{DIFFUSERS_FILE}")',),
    }
)
"""The lines that load an adapter of each component of a pipeline."""


def _own_arguments(
    config: RunConfig, rollout: GlmImageRolloutSection | DiffusersRolloutSection
) -> Mapping[str, object]:
    """Return guidance and other arguments as the pipeline calls them, which files on this machine tell."""
    saved = _saved(config)
    if saved is None or not isinstance(rollout, DiffusersRolloutSection):
        return {"guidance_scale": rollout.guidance_scale}
    return {**call_settings(saved, rollout), **saved.pipeline_class.fixed_arguments(rollout.size)}


def _quantization(config: RunConfig, merged: bool, sees: bool) -> str:
    """Return the argument that quantizes a language model under its adapter as in training; empty without one."""
    quantization = config.policy.quantization
    if merged or quantization is None:
        return ""
    # Importing transformers takes seconds, and the card of any other run needs none of it.
    from grpo_core.policies.causal_lm.loading import CAUSAL_LM, modules_in_full, on_meta, read_config
    from grpo_core.policies.vision_lm.loading import VISION_LM

    kind = VISION_LM if sees else CAUSAL_LM
    model = on_meta(read_config(local_source(config.policy.model, config.policy.revision), kind), kind)
    arguments = quantization.arguments(config.policy.dtype, modules_in_full(model, kind))
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f", quantization_config=BitsAndBytesConfig({given})"


def _revision(config: RunConfig, merged: bool) -> str:
    revision = config.policy.revision
    return "" if merged or revision is None else f', revision="{revision}"'


def _has_own_processor(model: str) -> bool:
    """Return whether a GLM-Image's folder has code for its processor; a hub name counts as one without."""
    index = Path(model).expanduser() / INDEX_FILE
    return index.is_file() and json.loads(index.read_text())["processor"][0] != "glm_image"


def _text_usage(config: RunConfig, rollout: TextRolloutSection, exported: str, merged: bool) -> str:
    model = exported if merged else config.policy.model
    sees = isinstance(rollout, VisionRolloutSection)
    auto, reads = ("AutoModelForImageTextToText", "processor") if sees else ("AutoModelForCausalLM", "tokenizer")
    reader = f"Auto{reads.capitalize()}"
    lines = [
        f"from transformers import {auto}, {reader}",
        "",
        f'{reads} = {reader}.from_pretrained("{model}")',
    ]
    quantized = _quantization(config, merged, sees)
    if quantized:
        lines[0] = lines[0].replace(f", {reader}", f", {reader}, BitsAndBytesConfig")
    settings = f', dtype="{config.policy.dtype}"{quantized}{_revision(config, merged)}'
    lines += [f'model = {auto}.from_pretrained("{model}"{settings})']
    if not merged:
        lines = ["from peft import PeftModel", *lines, f'model = PeftModel.from_pretrained(model, "{exported}")']
    if isinstance(rollout, VisionRolloutSection):
        lines += _image_inputs(rollout)
    elif _uses_template(config.policy, rollout):
        system = rollout.system_prompt
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages += [{"role": "user", "content": TEXT_PROMPT}]
        lines += [
            f"messages = {json.dumps(messages, ensure_ascii=False)}",
            "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, "
            'return_tensors="pt")',
        ]
    else:
        lines += [f'inputs = tokenizer("{TEXT_PROMPT}", return_tensors="pt")']
    return "\n".join(
        [
            *lines,
            f"output = model.generate(**inputs, max_new_tokens={rollout.max_completion_length})",
            f'print({reads}.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        ]
    )


def _image_inputs(rollout: VisionRolloutSection) -> list[str]:
    """Return the lines that make the inputs of a prompt with an image."""
    content = [{"type": "image", "path": "image.png"}, {"type": "text", "text": QUESTION}]
    messages: list[dict[str, object]] = [{"role": "user", "content": content}]
    if rollout.system_prompt is not None:
        system = [{"type": "text", "text": rollout.system_prompt}]
        messages = [{"role": "system", "content": system}, *messages]
    return [
        f"messages = {json.dumps(messages, ensure_ascii=False)}",
        "inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, "
        'return_dict=True, return_tensors="pt")',
    ]


def _uses_template(policy: PolicySection, rollout: TextRolloutSection) -> bool:
    """Return whether prompts are formatted as messages; a model that is not here counts as one with a template."""
    folder = Path(policy.model).expanduser()
    folder = folder if folder.is_dir() else Path(local_source(policy.model, policy.revision or "main"))
    if rollout.chat_template is not None or not folder.is_dir():
        return rollout.chat_template is not False
    config = folder / "tokenizer_config.json"
    return any(folder.glob("chat_template*")) or (
        config.is_file() and "chat_template" in json.loads(config.read_text())
    )


_LICENCE = (
    "Not stated. The licences of the base model and of the data apply; add yours as `license:` at the top of this file."
)


def another_function(quantization: str, kind: str, difference: MergedDifference | None) -> str:
    """Say what an export of adapters over a quantized base computes.

    Args:
        quantization: in a few words.
        kind: of the export, adapter or merged.
        difference: of the merged model; None where it was not measured.
    """
    trained = f"The adapters were trained over a base in {quantization}."
    if kind == "adapter":
        return f"{trained} Over a base that is not quantized in the same way they are another function."
    how_far = f"its log-probs differ by {difference}" if difference is not None else "no stored rollouts to measure it"
    return f"{trained} Merged into the unquantized base they are another function than the policy: {how_far}."


def model_card(plan: ExportPlan, difference: MergedDifference | None = None) -> str:
    """Return the card: base, data, rewards, held-out rewards before and after, and how the export is used.

    Args:
        difference: of a merged model from the policy, where the policy's base is quantized.
    """
    exported = plan.repository or plan.folder.name
    sections = {
        "Training": [markdown_of(Report("", training_facts(plan)))],
        "Held-out rewards": [markdown_of(Report("", tables=[heldout_table(plan)]))],
        "Use": ["```python", usage(plan.config, exported, merged=plan.base is not None), "```"],
        "Licence": [_LICENCE],
    }
    body = [f"# {plan.store.run}, version {plan.policy.version}", "", _summary(plan)]
    if (quantization := plan.config.policy.quantization) is not None:
        kind = "adapter" if plan.base is None else "merged"
        body += ["", another_function(quantization.description, kind, difference)]
    for title, lines in sections.items():
        body += ["", f"## {title}", "", *lines]
    return "\n".join(["---", _metadata(plan), "---", "", *body, ""])


_KINDS = MappingProxyType(
    {
        "text-to-image": "An image generator",
        "image-to-image": "An image editor",
        "text-generation": "A language model",
        "image-text-to-text": "A vision-language model",
    }
)
"""What a model of each of the hub's tasks is called."""


def hub_task(config: RunConfig) -> str:
    """Return the hub's name of what a run's model does: its `pipeline_tag`."""
    if isinstance(config.rollout, VisionRolloutSection):
        return "image-text-to-text"
    if policy_family(config.policy.kind).modality == "text":
        return "text-generation"
    return "image-to-image" if _edits(config) else "text-to-image"


def _edits(config: RunConfig) -> bool:
    return any(dataset.image_column is not None for dataset in config.data.sets)


def _summary(plan: ExportPlan) -> str:
    what = _KINDS[hub_task(plan.config)]
    several = len(plan.config.policy.streams) > 1
    form = "the adapters of both its parts" if several else "an adapter"
    return f"{what} trained with rewards (GRPO). This is {'the merged model' if plan.base is not None else form}."


def _metadata(plan: ExportPlan) -> str:
    from huggingface_hub import ModelCardData

    image = policy_family(plan.config.policy.kind).modality == "image"
    of_models = "diffusers" if image else "transformers"
    library = of_models if plan.base is not None or "denoising" in plan.config.policy.streams else "peft"
    model = plan.config.policy.model
    data = ModelCardData(
        # The hub refuses names that it does not know.
        base_model=None if Path(model).expanduser().is_dir() else model,
        library_name=library,
        pipeline_tag=hub_task(plan.config),
        tags=["grpo", *(["lora"] if plan.base is None else [])],
    )
    return str(data.to_yaml())
