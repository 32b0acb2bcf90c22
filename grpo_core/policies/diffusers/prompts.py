"""Prompts that no text encoder of a pipeline reads to their end; only its tokenizers are loaded."""

from collections.abc import Sequence
from typing import Any

from grpo_core.errors import InputError
from grpo_core.policies.diffusers.saved_pipeline import SavedPipeline
from grpo_core.policies.diffusers.settings import DiffusersSettings
from grpo_core.policies.pipeline_files import find_model_file


def refuse_cut_prompts(model: str, saved: SavedPipeline, settings: DiffusersSettings, prompts: Sequence[str]) -> None:
    """Refuse prompts that every text encoder cuts off: two of them that differ only later would be one to the model.

    Raises:
        InputError: names the first such prompt.
    """
    tokenizers = _tokenizers(model, saved)
    limits = [_limit(each, saved, settings) for each in tokenizers]
    for prompt in dict.fromkeys(prompts):
        lengths = [len(each(prompt, truncation=False, verbose=False).input_ids) for each in tokenizers]
        if lengths and all(length > limit for length, limit in zip(lengths, limits, strict=True)):
            read = max(limits)
            hint = f"It has {min(lengths)} ids and the model reads {read} of them; shorten it"
            longer = "max_sequence_length" in saved.pipeline_class.call
            raise InputError("prompt", prompt, hint + (", or set rollout.max_sequence_length." if longer else "."))


def _tokenizers(model: str, saved: SavedPipeline) -> list[Any]:
    from transformers import AutoTokenizer

    found = (find_model_file(model, f"{part}/tokenizer_config.json") for part in saved.parts if "tokenizer" in part)
    return [AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False) for file in found if file is not None]


def _limit(tokenizer: Any, saved: SavedPipeline, settings: DiffusersSettings) -> int:
    """Return how many ids of a prompt are read: `max_sequence_length`, or all that CLIP has positions for."""
    own = int(tokenizer.model_max_length)
    if "CLIP" in type(tokenizer).__name__:
        return own
    default = saved.pipeline_class.call.get("max_sequence_length")
    return settings.max_sequence_length or (default if isinstance(default, int) else own)
