"""Weights that a reward comes from: a local path or a name on the Hugging Face Hub, checked before anything loads.

- ``files``: one weight file (``path`` or ``hf://owner/repo/file``) with its digest.
- ``hub``: what is in the local cache of the Hub, what can be fetched into it, and what the Hub said where it cannot.
- ``models``: a whole transformers model (a folder or ``owner/repo``) with one digest over its files.
- ``tensors``: what is in a weight file, and whether it fits a network.
"""

from grpo_core.rewards.weights.files import (
    PublishedWeights,
    WeightFile,
    check_digest_setting,
    check_source_setting,
    file_sha256,
    find_weights_problem,
    resolve_weights,
)
from grpo_core.rewards.weights.models import (
    find_model_problem,
    load_pretrained,
    load_tokenizer,
    model_folder,
    model_sha256,
)
from grpo_core.rewards.weights.tensors import load_state_dict, load_weights, tensor_shapes

__all__ = [
    "PublishedWeights",
    "WeightFile",
    "check_digest_setting",
    "check_source_setting",
    "file_sha256",
    "find_model_problem",
    "find_weights_problem",
    "load_pretrained",
    "load_state_dict",
    "load_tokenizer",
    "load_weights",
    "model_folder",
    "model_sha256",
    "resolve_weights",
    "tensor_shapes",
]
