"""A pipeline by folder or hub name, and what of its transformer is trained."""

import inspect
import re
from typing import Any

import diffusers
from diffusers import DiffusionPipeline
from torch import nn

from grpo_core.errors import InputError
from grpo_core.pipeline_files import INDEX_FILE, refuse_missing_folder
from grpo_core.policies import pipeline_loading
from grpo_core.policies.diffusers.saved_pipeline import SavedPipeline, read_saved_pipeline
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.policies.trained.settings import TrainingChoice

TRANSFORMER = "transformer"
_IN_BLOCKS = re.compile(
    r".+\.\d+\.(?:(?:attn\d?|\w*attention|ff\w*|feed_forward|\w*mlp)\..+|(?:gate|up|down)_proj|proj_mlp|proj_out)"
)
"""Attention and feed-forward layers of a block, by the names that models of diffusers give them; no modulation."""


def require_saved_pipeline(model: str) -> SavedPipeline:
    """Read the configuration files of a pipeline that can be trained and has to be on this machine, or InputError."""
    refuse_missing_folder(model)
    saved = read_saved_pipeline(model)
    if saved is None:
        raise InputError(
            "policy.model",
            model,
            "Its files are not on this machine; give a saved pipeline's folder, or a hub name that can be reached.",
        )
    return saved


def absent_parts(model: str, saved: SavedPipeline) -> dict[str, None]:
    """Return as None the parts a pipeline was saved without, of those that its constructor has to be given.

    InputError names one that the class cannot do without.
    """
    found, spared = getattr(diffusers, saved.class_name), saved.pipeline_class.can_lack
    wanted = [each for each in inspect.signature(found.__init__).parameters.values() if each.name != "self"]
    needed = {each.name for each in wanted if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD}
    absent = needed - saved.parts.keys()
    spared = spared if absent.issuperset(spared[:1]) else ()
    if missing := sorted(absent.difference(found._optional_components, spared)):
        hint = f"Its {INDEX_FILE} has no {' and no '.join(missing)}; save it with all that a {saved.class_name} needs."
        raise InputError("policy.model", model, hint)
    return dict.fromkeys(sorted(absent))


def load_pipeline(model: str, **options: Any) -> Any:
    """Load all parts of a pipeline, frozen; options and errors as in `pipeline_loading.load_pipeline`."""
    saved = require_saved_pipeline(model)
    absent = absent_parts(model, saved)

    def read(**arguments: Any) -> Any:
        return DiffusionPipeline.from_pretrained(
            model, use_safetensors=True, trust_remote_code=False, **absent, **arguments
        )

    return pipeline_loading.load_pipeline(model, read, saved.parts, saved.folder, **options)


def train_transformer(transformer: Any, choice: TrainingChoice, model: str, **options: Any) -> TrainedModel:
    """Make the chosen part of a pipeline's transformer trainable; other arguments and errors as in `train_model`."""
    targets = default_targets(transformer) if choice.lora is not None and choice.lora.targets is None else None
    return train_model(transformer, choice, base_name=model, default_targets=targets, **options)


def default_targets(transformer: nn.Module) -> str:
    """Return a regular expression for the attention and feed-forward layers of all blocks; InputError without any."""
    linear = (name for name, each in transformer.named_modules() if isinstance(each, nn.Linear))
    found = dict.fromkeys(re.sub(r"\.\d+\.", "|", name, count=1) for name in linear if _IN_BLOCKS.fullmatch(name))
    if not found:
        hint = f"{type(transformer).__name__} names the layers of its blocks in its own way; give a regular expression."
        raise InputError("policy.lora.targets", None, hint)
    return "|".join(re.escape(name).replace(r"\|", r"\.\d+\.") for name in found)
