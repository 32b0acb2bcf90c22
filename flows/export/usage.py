"""The lines of Python that draw or answer with an export, as its card and the command show them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from configs.rollouts import DiffusersRolloutSection, TextRolloutSection, VisionRolloutSection
from configs.schema import RunConfig
from grpo_core.pipeline_files import INDEX_FILE
from grpo_core.policies.diffusers.saved_pipeline import SavedPipeline, call_settings, read_saved_pipeline
from tasks.models.initial import local_source

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
"""Where diffusers looks for an adapter in a folder."""

IMAGE_PROMPT, EDIT_PROMPT = "a red circle in the center on a white background", "make it dusk"
TEXT_PROMPT, QUESTION = "Write a haiku about rain.", "What is in this image?"

_IMAGE = """\
import torch
from diffusers import {{ pipeline }}
{% if source %}
from diffusers.utils import load_image
{% endif %}
{% if "tokens" in adapters %}
from peft import PeftModel
{% endif %}

pipe = {{ pipeline }}.from_pretrained("{{ model }}", dtype=torch.{{ dtype }}{{ loading }})
{% if "tokens" in adapters %}
adapted = PeftModel.from_pretrained(pipe.vision_language_encoder, {{ adapters.tokens }})
pipe.vision_language_encoder = adapted.merge_and_unload()
{% endif %}
{% if "denoising" in adapters %}
pipe.transformer.load_lora_adapter({{ adapters.denoising }}, weight_name="{{ file }}")
{% endif %}
image = pipe(prompt="{{ prompt }}"{% if source %}, image={{ source }}{% endif %}, {{ settings }}).images[0]
image.save("image.png")"""

_TEXT = """\
{% if adapter %}
from peft import PeftModel
{% endif %}
from transformers import {{ auto }}, {{ reader_class }}{{ ", BitsAndBytesConfig" if quantized }}

{{ reader }} = {{ reader_class }}.from_pretrained("{{ model }}")
model = {{ auto }}.from_pretrained("{{ model }}", dtype="{{ dtype }}"{{ quantized }}{{ loading }})
{% if adapter %}
model = PeftModel.from_pretrained(model, "{{ adapter }}")
{% endif %}
{% if messages %}
messages = {{ messages }}
inputs = {{ reader }}.apply_chat_template(messages, add_generation_prompt=True{{ ", tokenize=True" if sees }}, \
return_dict=True, return_tensors="pt")
{% else %}
inputs = {{ reader }}("{{ prompt }}", return_tensors="pt")
{% endif %}
output = model.generate(**inputs, max_new_tokens={{ length }})
print({{ reader }}.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""

_LANGUAGE = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False, undefined=jinja2.StrictUndefined)
_PIPELINES: Mapping[str, str] = {"glm_image": "GlmImagePipeline", "diffusers": "DiffusionPipeline"}


def usage(config: RunConfig, exported: str, *, merged: bool) -> str:
    """Return a script that draws one image, or answers one prompt, with an export by its folder or hub name."""
    values = {
        "model": exported if merged else config.policy.model,
        "dtype": config.policy.dtype,
        "loading": "" if merged or not config.policy.revision else f', revision="{config.policy.revision}"',
    }
    rollout = config.evaluation_rollout
    if isinstance(rollout, TextRolloutSection):
        adapter = None if merged else exported
        return _LANGUAGE.from_string(_TEXT).render(**values, adapter=adapter, **_text_values(config, rollout, merged))
    values["loading"] = _pipeline_options(config) + values["loading"]
    several = len(config.policy.streams) > 1
    adapters = {
        stream: f'"{exported}", subfolder="{stream}"' if several else f'"{exported}"'
        for stream in (() if merged else config.policy.streams)
    }
    source = _source_argument(config)
    return _LANGUAGE.from_string(_IMAGE).render(
        **values,
        pipeline=_PIPELINES[config.policy.kind],
        file=DIFFUSERS_FILE,
        adapters=adapters,
        source=source,
        prompt=IMAGE_PROMPT if source is None else EDIT_PROMPT,
        settings=", ".join(f"{name}={value!r}" for name, value in _call_settings(config, rollout).items()),
    )


def edits(config: RunConfig) -> bool:
    """Return whether the prompts of a run have images to edit."""
    return any(dataset.image_column is not None for dataset in config.data.sets)


def _saved(config: RunConfig) -> SavedPipeline | None:
    return read_saved_pipeline(config.policy.model) if config.policy.kind == "diffusers" else None


def _pipeline_options(config: RunConfig) -> str:
    """Return the options that the base's own folder needs: code of its processor, parts that it was saved without."""
    saved = _saved(config)
    if saved is not None:
        absent = [part for part in saved.pipeline_class.can_lack if part not in saved.parts]
        return "".join(f", {part}=None" for part in absent)
    index = Path(config.policy.model).expanduser() / INDEX_FILE
    own = index.is_file() and json.loads(index.read_text())["processor"][0] != "glm_image"
    return ", trust_remote_code=True" if own else ""


def _source_argument(config: RunConfig) -> str | None:
    """Return the image to edit as the pipeline's call takes it; None for a run whose prompts have none."""
    if not edits(config):
        return None
    saved, loaded = _saved(config), 'load_image("source.png")'
    argument = None if saved is None else saved.pipeline_class.sources
    if saved is not None and argument is None:
        return None
    return f"[{loaded}]" if argument is None or argument.as_list else loaded


def _call_settings(config: RunConfig, rollout: Any) -> Mapping[str, object]:
    settings = {name: getattr(rollout, name) for name in ("height", "width", "num_inference_steps")}
    saved = _saved(config)
    if saved is None or not isinstance(rollout, DiffusersRolloutSection):
        return {**settings, "guidance_scale": rollout.guidance_scale}
    return {**settings, **call_settings(saved, rollout), **saved.pipeline_class.fixed_arguments(rollout.size)}


def _text_values(config: RunConfig, rollout: TextRolloutSection, merged: bool) -> Mapping[str, object]:
    sees = isinstance(rollout, VisionRolloutSection)
    system = [] if rollout.system_prompt is None else [{"role": "system", "content": rollout.system_prompt}]
    messages: list[Mapping[str, object]] = [*system, {"role": "user", "content": TEXT_PROMPT}]
    if sees:
        blocks = [{"type": "image", "path": "image.png"}, {"type": "text", "text": QUESTION}]
        messages = [
            *({**each, "content": [{"type": "text", "text": each["content"]}]} for each in system),
            {"role": "user", "content": blocks},
        ]
    as_messages = sees or _uses_template(config, rollout)
    return {
        "sees": sees,
        "auto": "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM",
        "reader": "processor" if sees else "tokenizer",
        "reader_class": "AutoProcessor" if sees else "AutoTokenizer",
        "quantized": "" if merged else _quantization(config, sees),
        "messages": json.dumps(messages, ensure_ascii=False) if as_messages else None,
        "prompt": TEXT_PROMPT,
        "length": rollout.max_completion_length,
    }


def _quantization(config: RunConfig, sees: bool) -> str:
    """Return the argument that quantizes a language model under its adapter as in training; empty without one."""
    quantization = config.policy.quantization
    if quantization is None:
        return ""
    # Importing transformers takes seconds, and the card of any other run needs none of it.
    from grpo_core.policies.causal_lm.loading import CAUSAL_LM, on_meta, read_config
    from grpo_core.policies.trained.quantization import skipped_modules
    from grpo_core.policies.vision_lm.loading import VISION_LM

    kind = VISION_LM if sees else CAUSAL_LM
    model = on_meta(read_config(local_source(config.policy.model, config.policy.revision), kind), kind)
    arguments = quantization.arguments(config.policy.dtype, skipped_modules(model, kind.outside))
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f", quantization_config=BitsAndBytesConfig({given})"


def _uses_template(config: RunConfig, rollout: TextRolloutSection) -> bool:
    """Return whether prompts are formatted as messages; a model that is not here counts as one with a template."""
    policy = config.policy
    folder = Path(policy.model).expanduser()
    folder = folder if folder.is_dir() else Path(local_source(policy.model, policy.revision or "main"))
    if rollout.chat_template is not None or not folder.is_dir():
        return rollout.chat_template is not False
    file = folder / "tokenizer_config.json"
    return any(folder.glob("chat_template*")) or (file.is_file() and "chat_template" in json.loads(file.read_text()))
