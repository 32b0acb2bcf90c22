"""Load a causal language model by folder or hub name, refuse what is none, and list what adapters leave out."""

import pickle
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_core.errors import InputError
from grpo_core.pipeline_files import CONFIG_FILE, ONE_NETWORK, refuse_missing_folder
from grpo_core.policies.causal_lm.model_types import refuse_known
from grpo_core.policies.causal_lm.settings import Context
from grpo_core.policies.trained.component import use_attention
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.model import CPU, TrainedModel
from grpo_core.policies.trained.quantization import (
    QuantizationSettings,
    prepare_layers,
    quantized_loading,
    refuse_unusable_weights,
)
from grpo_core.policies.trained.settings import TrainingChoice

_TOKENIZER_FILES = (
    "*processor_config.json",
    *("tokenizer*", "chat_template*", "additional_chat_templates", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "*.model", "*.tiktoken"),
)
UNREADABLE = (OSError, ValueError, HFValidationError, StrictDataclassError, SafetensorError, pickle.UnpicklingError)


def place_of(model: str) -> str:
    """Return the folder that a model is loaded from, or its hub name."""
    path = Path(model).expanduser()
    return str(path) if path.is_dir() else model


def refusal(model: str, what: str, error: Exception) -> InputError:
    """Return the error for a part of a model that cannot be read."""
    first_line = str(error).strip().splitlines()[0]
    hint = f"Its {what} cannot be read. Give a folder with complete files, or a hub name that is cached or reachable "
    return InputError("policy.model", model, f"{hint}({first_line}).")


@dataclass(frozen=True)
class ModelKind:
    """A kind of language models by the class of transformers that loads them.

    Attributes:
        classes: names of the models' classes by model type.
        described: the kind in words, for errors.
        outside: returns the parameters of a model outside its language model, which are never quantized.
        load_reader: loads what reads its prompts: a tokenizer, or a processor.
    """

    auto: Any
    classes: Mapping[str, str | Sequence[str]]
    described: str
    load_reader: Callable[[str], Any]
    outside: Callable[[Any], Iterable[Tensor]] = lambda model: ()


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; InputError if there is none, or it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(place_of(model), trust_remote_code=False)
    except UNREADABLE as error:
        raise refusal(model, "tokenizer", error) from error


CAUSAL_LM = ModelKind(AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "causal language model", load_tokenizer)


def read_config(model: str, kind: ModelKind = CAUSAL_LM) -> Any:
    """Read the configuration of a language model, a folder or a hub name, without weights; InputError for any other."""
    refuse_missing_folder(model, CONFIG_FILE)
    try:
        config = AutoConfig.from_pretrained(place_of(model), trust_remote_code=False)
    except UNREADABLE as error:
        raise refusal(model, "configuration", error) from error
    known = {name for names in kind.classes.values() for name in ((names,) if isinstance(names, str) else names)}
    kinds = list(config.architectures or [])
    # transformers adds a random head to a model without one, and to an encoder.
    if config.model_type not in kind.classes or (kinds and not known.intersection(kinds)):
        found = ", ".join(kinds) or config.model_type
        hint = f"It is {found}, not a {kind.described}; give one that transformers' {kind.auto.__name__} loads."
        raise InputError("policy.model", model, hint)
    return config


def read_context(config: Any) -> Context:
    """Return the number of ids that the model can read and write together.

    Rows end at LongRoPE's original length: beyond it a call has other frequencies, so a cache that was filled below is
    wrong, and so is one pass over a row. Dynamic NTK changes past the configured length only.
    """
    text = config.get_text_config()
    length, ropes = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or text.original_max_position_embeddings
            if length is None or original < length:
                reached = "" if length is None else f" (it reads {length} ids with others)"
                why = f", past which the frequencies of its LongRoPE ({text.model_type}) change{reached}"
                return Context(int(original), why)
    return Context(None if length is None else int(length))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer unchanged; saved again, they name classes that other versions do not know."""
    for path in sorted(path for pattern in _TOKENIZER_FILES for path in source.glob(pattern)):
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, target / path.name)


def load_model(
    model: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kind: ModelKind = CAUSAL_LM,
    quantization: QuantizationSettings | None = None,
) -> Any:
    """Load the model, a folder or a hub name, in evaluation mode; InputError for any other, or missing weights.

    Linear layers are quantized, if at all, but for the output head and what encodes images.
    """
    config = read_config(model, kind)
    options: dict[str, Any] = {}
    if quantized := quantized_loading(ONE_NETWORK, quantization, dtype, lambda _: on_meta(config, kind), kind.outside):
        options["quantization_config"] = quantized[""]
    if quantized or getattr(config, "quantization_config", None) is not None:
        # Weights in 4 bits are for one device, from which they are not moved.
        options["device_map"] = {"": device}
    # Its progress bars would break ours.
    transformers.utils.logging.disable_progress_bar()
    try:
        loaded, report = kind.auto.from_pretrained(
            place_of(model),
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=False,
            weights_only=True,
            **options,
        )
    except UNREADABLE as error:
        raise refusal(model, "weights", error) from error
    if report["missing_keys"] or report["mismatched_keys"]:
        missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        hint = f"Its files lack weights, or have them in another shape: {', '.join(missing[:3])}. Save it again."
        raise InputError("policy.model", model, hint)
    prepare_layers(loaded, quantization)
    return loaded.to(device).eval()


def on_meta(config: Any, kind: ModelKind) -> Any:
    """Build a model of this kind on the meta device: every shape and name, no memory and no values."""
    with torch.device("meta"):
        return kind.auto.from_config(config)


def vocabulary_size(model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return n: ids [0, n), those with a text in the tokenizer, are sampled and scored; heads are often padded.

    InputError if the tokenizer has ids that the model has no embedding for.
    """
    highest = max(tokenizer.get_vocab().values())
    rows = model.get_input_embeddings().weight.shape[0]
    if highest >= rows:
        hint = f"Its tokenizer has ids up to {highest}, its embedding {rows} rows: they do not belong together."
        raise InputError("policy.model", model.config.name_or_path, hint)
    return int(highest) + 1


# In peft's sense: every linear layer but the output head, whatever the architecture calls them.
ALL_LINEAR = "all-linear"
_NAMED = 4


def train_language_model(
    base: Any,
    choice: TrainingChoice,
    kind: ModelKind = CAUSAL_LM,
    *,
    base_name: str,
    initial_state: Callable[[], dict[str, Tensor]] | None = None,
) -> TrainedModel:
    """Call `train_model`; by default every linear layer but the head gets an adapter, none outside a frozen vision.

    InputError also for adapters that reach layers of the frozen vision.
    """
    frozen = {id(each) for each in kind.outside(base)} if choice.freeze_vision else set()
    trained = train_model(
        base,
        choice,
        base_name=base_name,
        default_targets=decoder_linears(base) if frozen else ALL_LINEAR,
        own_frozen=tuple(name for name, each in base.named_parameters() if id(each) in frozen),
        initial_state=initial_state,
    )
    # With adapters, which are parameters of their own.
    frozen = {id(each) for each in kind.outside(base)} if frozen else frozen
    if matched := [name for name, each in trained.trainable_parameters().items() if id(each) in frozen]:
        hint = f"They reach {matched[0]}, which is not of the language model; set policy.freeze_vision to false."
        found = None if choice.lora is None else choice.lora.targets or choice.lora.modules_to_save
        raise InputError("policy.lora.targets", found, hint)
    return trained


def load_trained(
    model: str,
    kind: ModelKind,
    choice: TrainingChoice,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str | None = None,
) -> TrainedModel:
    """Load a language model with the chosen part of it trainable; on the meta device without weights.

    InputError for no such model, one that is known not to run here, or adapter targets that match nothing.
    """
    config = read_config(model, kind)
    if device.type == "meta":
        return train_language_model(on_meta(config, kind), choice, kind, base_name=model, initial_state=dict)
    adapters = choice.lora is not None
    refuse_unusable_weights(model, ONE_NETWORK, choice.quantization, device, trained=ONE_NETWORK, adapters=adapters)
    refuse_known(model, config)
    base = load_model(model, dtype=dtype, device=device, kind=kind, quantization=choice.quantization)
    use_attention(base, attn_implementation)

    def read_again() -> dict[str, Tensor]:
        state: dict[str, Tensor] = load_model(model, dtype=dtype, device=CPU, kind=kind).state_dict()
        return state

    return train_language_model(base, choice, kind, base_name=model, initial_state=read_again)


def decoder_linears(model: Any) -> str:
    """Return a regular expression over the names of the linear layers of the language model, its head left out."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    linears = {name.rpartition(".")[2] for name, each in decoder.named_modules() if isinstance(each, nn.Linear)}
    return rf"{re.escape(prefix)}\.(.*\.)?({'|'.join(map(re.escape, sorted(linears)))})"


def matrices_without_adapter(model: Any) -> dict[str, int]:
    """Count the elements of matrices without an adapter, but for embeddings and head, of a model inside peft's wrapper.

    peft's "all linear layers" leaves out matrices that are no `nn.Linear`, such as the experts of some models, and
    layers that share their names with experts (peft 0.21: the dense layers and shared experts of DeepSeek-V3). Names
    have `*` for the index of a layer or expert; most elements come first.
    """
    adapted = {id(weight) for weight in _adapted(model)}
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    adapted |= {id(module.weight) for module in (*tables, model.get_output_embeddings()) if module is not None}
    found: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        # Experts have their biases in one matrix.
        is_matrix = parameter.ndim >= 2 and not name.endswith("bias")
        if is_matrix and not parameter.requires_grad and id(parameter) not in adapted:
            found[re.sub(r"\.\d+(?=\.)", ".*", name.replace(".base_layer", ""))] += parameter.numel()
    return dict(found.most_common())


def _adapted(model: nn.Module) -> Iterator[nn.Parameter]:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    for module in model.modules():
        if isinstance(module, ParamWrapper):
            yield module.get_param()
        elif isinstance(module, LoraLayer):
            yield module.get_base_layer().weight


def describe_left_out(base: Any) -> str | None:
    """Say which matrices of a model inside peft's wrapper get no adapter, with their share; None if each has one."""
    left_out = matrices_without_adapter(base)
    if not left_out:
        return None
    total = sum(parameter.numel() for parameter in base.parameters() if not parameter.requires_grad)
    more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
    share = sum(left_out.values()) / total
    return f"adapters leave out {share:.2%} of the parameters: {', '.join(list(left_out)[:_NAMED])}{more}"
