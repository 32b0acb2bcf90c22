"""Load a causal language model by folder or hub name, and refuse what is none."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.settings import refuse_missing_folder

_TOKENIZER_FILES = (
    *("tokenizer*", "chat_template*", "additional_chat_templates", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "*.model", "*.tiktoken"),
)
_UNREADABLE = (OSError, ValueError, HFValidationError, StrictDataclassError, SafetensorError, pickle.UnpicklingError)


def _place(model: str) -> str:
    path = Path(model).expanduser()
    return str(path) if path.is_dir() else model


def _refusal(model: str, what: str, error: Exception) -> InputError:
    first_line = str(error).strip().splitlines()[0]
    hint = f"Its {what} cannot be read. Give a folder with complete files, or a hub name that is cached or reachable "
    return InputError("policy.model", model, f"{hint}({first_line}).")


def read_config(model: str) -> Any:
    """Read the configuration of a causal language model; no weights are opened.

    Args:
        model: a folder written by `save_pretrained`, or a hub name.

    Raises:
        InputError: it does not exist, cannot be read, or is another kind of model.
    """
    refuse_missing_folder(model)
    try:
        config = AutoConfig.from_pretrained(_place(model), trust_remote_code=False)
    except _UNREADABLE as error:
        raise _refusal(model, "configuration", error) from error
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    causal = {name for names in classes for name in ((names,) if isinstance(names, str) else names)}
    kinds = list(config.architectures or [])
    # transformers adds a random head to a model without one, and to an encoder.
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or (kinds and not causal.intersection(kinds)):
        found = ", ".join(kinds) or config.model_type
        hint = f"It is {found}, not a causal language model; give one that transformers' AutoModelForCausalLM loads."
        raise InputError("policy.model", model, hint)
    return config


def context_length(config: Any) -> int | None:
    """Return the number of ids that the model can read and write together; None if unbounded."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(_place(model), trust_remote_code=False)
    except _UNREADABLE as error:
        raise _refusal(model, "tokenizer", error) from error


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer unchanged; saved again, they name classes that other versions do not know."""
    for path in sorted(path for pattern in _TOKENIZER_FILES for path in source.glob(pattern)):
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, target / path.name)


def load_model(model: str, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the model in evaluation mode.

    Args:
        model: a folder written by `save_pretrained`, or a hub name.

    Raises:
        InputError: it does not exist, is another kind of model, or lacks weights.
    """
    read_config(model)
    # Its progress bars would break ours.
    transformers.utils.logging.disable_progress_bar()
    try:
        loaded, report = AutoModelForCausalLM.from_pretrained(
            _place(model), dtype=dtype, output_loading_info=True, trust_remote_code=False, weights_only=True
        )
    except _UNREADABLE as error:
        raise _refusal(model, "weights", error) from error
    if report["missing_keys"] or report["mismatched_keys"]:
        missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        hint = f"Its files lack weights, or have them in another shape: {', '.join(missing[:3])}. Save it again."
        raise InputError("policy.model", model, hint)
    return loaded.to(device).eval()


def vocabulary_size(model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return n: ids [0, n) are sampled and scored.

    Heads are often padded to a round number of rows. Ids without a text in the tokenizer are left out of the
    distribution, both while sampling and while scoring.

    Raises:
        InputError: the tokenizer has ids that the model has no embedding for.
    """
    highest = max(tokenizer.get_vocab().values())
    rows = model.get_input_embeddings().weight.shape[0]
    if highest >= rows:
        hint = f"Its tokenizer has ids up to {highest}, its embedding {rows} rows: they do not belong together."
        raise InputError("policy.model", model.config.name_or_path, hint)
    return int(highest) + 1
