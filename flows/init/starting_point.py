"""Which shipped configuration `grpo init` begins with, and what of it stays."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.sections import Kind
from flows.requests import OWN, InitRequest
from grpo_core.errors import InputError
from grpo_core.hub import one_message, plan_download
from grpo_core.pipeline_files import INDEX_FILE, find_model_file, read_kind, read_pipeline_file
from grpo_core.policies.protocol import policy_family
from tasks.models.reachable_hub import leave_unreachable_hub
from tasks.process import CHECKOUT

CONFIGS = CHECKOUT / "configs"

TINY: Mapping[Kind, str] = {
    "glm_image": "tiny",
    "diffusers": "tiny_sd3",
    "causal_lm": "tiny_text",
    "vision_lm": "tiny_grounding",
}
"""The configuration of each kind for the shipped tiny model."""

_FULL_SIZE: Mapping[Kind, str] = {
    "glm_image": "glm_image_80gb",
    "diffusers": "sd35_medium",
    "causal_lm": "text_7b",
    "vision_lm": "vision_2b",
}
_BY_PIPELINE = {
    "FluxPipeline": "flux1_dev",
    "FluxKontextPipeline": "flux_kontext",
    "StableDiffusion3Pipeline": "sd35_medium",
    "QwenImagePipeline": "qwen_image",
    "QwenImageEditPipeline": "qwen_image_edit",
    "QwenImageEditPlusPipeline": "qwen_image_edit",
}
"""Class of a pipeline -> the configuration with the numbers of its family."""

WITHOUT_GPU = "text_laptop"


def shipped_names() -> tuple[str, ...]:
    """Return the names of all shipped configurations."""
    return tuple(sorted(path.stem for path in CONFIGS.glob("*.yaml")))


def choose_name(model: str) -> str:
    """Return the shipped configuration whose numbers fit a model, of a folder or the hub: its own, or by its files."""
    for name in (*TINY.values(), "tiny_edit", *_FULL_SIZE.values(), *_BY_PIPELINE.values(), WITHOUT_GPU):
        own = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))["policy"]["model"]
        if model == own or Path(model).expanduser().resolve() == CHECKOUT / own:
            return name
    kind = _described_kind(model)
    if kind == "causal_lm":
        import torch

        return _FULL_SIZE[kind] if torch.cuda.is_available() else WITHOUT_GPU
    return _BY_PIPELINE.get(_pipeline_class(model), _FULL_SIZE[kind])


def _described_kind(model: str) -> Kind:
    kind = read_kind(model)
    if kind is None and not Path(model).expanduser().exists():
        leave_unreachable_hub()
        try:
            with one_message("--model", model, model):
                plan_download(model).run(weights=False)
        except InputError as error:
            hint = f"{error.hint} Or name a configuration with --from; then the model's files are not needed."
            raise InputError("--model", model, hint) from error
        kind = read_kind(model)
    if kind is None:
        hint = "It has neither model_index.json nor config.json; give the folder of a saved model, or a hub name."
        raise InputError("--model", model, hint)
    return kind


def is_of_its_family(model: str, name: str) -> bool:
    """Whether a pipeline is of the class that a configuration was written for; other models fit by their kind."""
    return read_kind(model) != "diffusers" or _BY_PIPELINE.get(_pipeline_class(model)) == name


def _pipeline_class(model: str) -> str:
    index = find_model_file(model, INDEX_FILE)
    return "" if index is None else str(read_pipeline_file(model, index).get("_class_name"))


def context_length(model: str) -> int | None:
    """Return how many ids a language model reads and writes together; None if that is not known."""
    file = find_model_file(model, "config.json")
    config = {} if file is None else read_pipeline_file(model, file)
    inner = config.get("text_config", config)
    room = inner.get("max_position_embeddings") if isinstance(inner, dict) else None
    return room if isinstance(room, int) and room > 1 else None


@dataclass(frozen=True)
class Start:
    """The shipped configuration that is begun with: its name, its text, and the same as plain values."""

    request: InitRequest
    name: str
    text: str
    given: Mapping[str, Any]

    @classmethod
    def of(cls, request: InitRequest) -> "Start":
        """Choose the file by --from, by the model's files, or by the kind."""
        if request.model is not None and request.kind is not None:
            raise InputError("--kind", request.kind, "The model's files tell it; leave it out.")
        name = request.template
        if name is not None:
            name = name.removeprefix("configs/").removesuffix(".yaml")
            if name not in shipped_names():
                raise InputError("--from", request.template, f"It is one of {', '.join(shipped_names())}.")
        elif request.model is not None:
            name = choose_name(request.model)
        else:
            name = TINY[request.kind or "glm_image"]
        text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
        return cls(request, name, text, yaml.safe_load(text))

    @property
    def kind(self) -> Kind:
        """The kind of its policy."""
        kind: Kind = self.given["policy"]["kind"]
        return kind

    @property
    def edits(self) -> bool:
        """Whether its prompts are images to edit, for which there is no example."""
        return policy_family(self.kind).modality == "image" and "image_column" in self.given["data"]

    @property
    def keeps_data(self) -> bool:
        """Whether its prompts stay."""
        return self.request.prompts is None and (self.request.template is not None or self.edits)

    @property
    def reward(self) -> str | None:
        """The reward that is written; None where its own stay."""
        kept = self.request.template is not None or self.keeps_data
        return self.request.reward or (None if kept else OWN)

    @property
    def examples(self) -> str:
        """The folder of examples for its kind."""
        return "vision" if self.kind == "vision_lm" else policy_family(self.kind).modality

    def problems(self) -> Iterator[InputError]:
        """Report options that do not fit the configuration."""
        request = self.request
        found = read_kind(request.model) if request.model is not None else request.kind
        if found is not None and found != self.kind:
            option = "--kind" if request.model is None else "--model"
            hint = f"It is {found}, and configs/{self.name}.yaml is for {self.kind}; leave --from out."
            yield InputError(option, request.model or request.kind, hint)
        for option, given, section in (
            ("--prompts", request.prompts, "data"),
            ("--heldout", request.heldout, "evaluate"),
        ):
            if given is not None and "datasets" in self.given[section]:
                hint = f"configs/{self.name}.yaml has {section}.datasets; leave it out, and change them in the file."
                yield InputError(option, given, hint)
