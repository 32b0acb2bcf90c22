"""What of a causal language model is trained, and which of its matrices adapters leave out."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_core.policies.trained import TrainedModel, TrainingChoice, train_model

# In peft's sense: every linear layer but the output head, whatever the architecture calls them.
ALL_LINEAR = "all-linear"
_NAMED = 4


def train_causal_lm(
    base: Any,
    choice: TrainingChoice,
    *,
    base_name: str,
    initial_state: Callable[[], dict[str, Tensor]] | None = None,
) -> TrainedModel:
    """Call `train_model`; by default every linear layer but the head gets an adapter.

    Raises:
        InputError: adapter targets or frozen names that match nothing, or nothing that would be trained.
    """
    with warnings.catch_warnings():
        # peft transposes the matrices of GPT-2's layers, with a warning for each.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
        return train_model(base, choice, base_name=base_name, default_targets=ALL_LINEAR, initial_state=initial_state)


def build_on_meta(model: str, config: Any, choice: TrainingChoice) -> TrainedModel:
    """Build the model on the meta device and apply the choice."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
    return train_causal_lm(base, choice, base_name=model, initial_state=dict)


def matrices_without_adapter(model: Any) -> dict[str, int]:
    """Count the elements of matrices that have no adapter, other than embeddings and the output head.

    peft's "all linear layers" leaves out matrices that are no `nn.Linear`, such as the experts of some models, and
    layers that share their names with experts (peft 0.21: the dense layers and shared experts of DeepSeek-V3).

    Args:
        model: inside peft's wrapper.

    Returns:
        Elements by parameter name with `*` for the index of a layer or expert, most first.
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


def describe_left_out(trained: TrainedModel) -> str | None:
    """Say which matrices of a model get no adapter, with their share of all parameters; None if each has one."""
    model: Any = trained.model
    base = model.get_base_model()
    left_out = matrices_without_adapter(base)
    if not left_out:
        return None
    total = sum(parameter.numel() for parameter in base.parameters() if not parameter.requires_grad)
    more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
    share = sum(left_out.values()) / total
    return f"adapters leave out {share:.2%} of the parameters: {', '.join(list(left_out)[:_NAMED])}{more}"
