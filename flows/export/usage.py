"""The lines of Python that draw or answer with an exported policy, in diffusers, transformers and peft alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from configs.schema import RunConfig
from configs.sections import DiffusersRolloutSection, GlmImageRolloutSection, TextRolloutSection
from grpo_core.policies.diffusers.guidance import call_settings
from grpo_core.policies.diffusers.saved_pipeline import read_saved_pipeline
from grpo_core.policies.pipeline_files import INDEX_FILE
from grpo_core.streams import Stream

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
"""Where diffusers looks for an adapter in a folder."""

IMAGE_PROMPT, TEXT_PROMPT = "a lighthouse at dusk", "Write a haiku about rain."


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
    adapters = {} if merged else {stream: _ADAPTERS[stream] for stream in config.policy.streams}
    imports = [name for stream in adapters for name in _ADAPTER_IMPORTS.get(stream, ())]
    lines = ["import torch", f"from diffusers import {pipeline}", *imports, ""]
    lines += [f'pipe = {pipeline}.from_pretrained("{model}", dtype=torch.{config.policy.dtype}{code})']
    several = len(adapters) > 1
    for stream, loading in adapters.items():
        place = f'"{exported}", subfolder="{stream}"' if several else f'"{exported}"'
        lines += [line.format(place=place) for line in loading]
    call = {name: getattr(rollout, name) for name in ("height", "width", "num_inference_steps")}
    settings = ", ".join(f"{name}={value!r}" for name, value in {**call, **_guidance(config, rollout)}.items())
    lines += [f'image = pipe("{IMAGE_PROMPT}", {settings}).images[0]', 'image.save("image.png")']
    return "\n".join(lines)


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


def _guidance(
    config: RunConfig, rollout: GlmImageRolloutSection | DiffusersRolloutSection
) -> Mapping[str, float | int | str]:
    """Return the arguments of guidance as the pipeline calls them, which files on this machine tell."""
    saved = read_saved_pipeline(config.policy.model) if isinstance(rollout, DiffusersRolloutSection) else None
    if saved is None or not isinstance(rollout, DiffusersRolloutSection):
        return {"guidance_scale": rollout.guidance_scale}
    return call_settings(saved, rollout)


def _revision(config: RunConfig, merged: bool) -> str:
    revision = config.policy.revision
    return "" if merged or revision is None else f', revision="{revision}"'


def _has_own_processor(model: str) -> bool:
    """Return whether a GLM-Image's folder has code for its processor; a hub name counts as one without."""
    index = Path(model).expanduser() / INDEX_FILE
    return index.is_file() and json.loads(index.read_text())["processor"][0] != "glm_image"


def _text_usage(config: RunConfig, rollout: TextRolloutSection, exported: str, merged: bool) -> str:
    model = exported if merged else config.policy.model
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{model}")',
    ]
    settings = f', dtype="{config.policy.dtype}"{_revision(config, merged)}'
    lines += [f'model = AutoModelForCausalLM.from_pretrained("{model}"{settings})']
    if not merged:
        lines = ["from peft import PeftModel", *lines, f'model = PeftModel.from_pretrained(model, "{exported}")']
    if _uses_template(config.policy.model, rollout):
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
            'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        ]
    )


def _uses_template(model: str, rollout: TextRolloutSection) -> bool:
    """Return whether prompts are formatted as messages; a model that is not a folder counts as one with a template."""
    folder = Path(model).expanduser()
    if rollout.chat_template is not None or not folder.is_dir():
        return rollout.chat_template is not False
    config = folder / "tokenizer_config.json"
    return any(folder.glob("chat_template*")) or (
        config.is_file() and "chat_template" in json.loads(config.read_text())
    )
