"""Turn a GGUF file of a Llama, such as SmolLM2, into a folder that this project and transformers load.

`python -m data.recipes.from_gguf FILE FOLDER [--dtype bfloat16]`; needs the package `gguf`. Weights that the file holds
in a few bits stay rounded to them: the folder of the original model is better where it can be had.
"""

import argparse
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import read_gguf_metadata

from grpo_core.errors import InputError

ARCHITECTURE = "llama"
_SMOLLM = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
)
"""How SmolLM2's tokenizer.json cuts a text; transformers would cut it as GPT-2 does, and say nothing."""

_OF_THE_FILE = (
    "quantization_config",
    "_pre_quantization_dtype",
    "hf_quantizer",
    "is_quantized",
    "quantization_method",
)


def convert(file: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the model of a GGUF file to a new folder.

    Args:
        dtype: of the written weights; values of 4 and 5 bits with an offset are exact in float32 only.

    Raises:
        InputError: the folder exists, or the file is not GGUF, has another architecture, or a tokenizer whose cut
            of a text is not known.
    """
    if folder.exists():
        raise InputError("FOLDER", str(folder), "It exists; name a new folder.")
    split = _split(file)
    if find_spec("gguf") is None:
        raise InputError("FILE", str(file), "Reading its weights needs a package: uv pip install gguf.")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    if split is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = split
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    config = model.config
    tokenizer.model_max_length = config.max_position_embeddings
    # The weights are plain numbers again, but save_pretrained refuses them for what the file was.
    for owner in (config, model):
        for name in (
            "quantization_config",
            "_pre_quantization_dtype",
            "hf_quantizer",
            "is_quantized",
            "quantization_method",
        ):
            vars(owner).pop(name, None)
    named = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(config, name) for name in named})
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _split(file: Path) -> pre_tokenizers.PreTokenizer | None:
    """Return how the tokenizer cuts a text where transformers does not know it."""
    try:
        metadata, tensors = read_gguf_metadata(str(file), ())
    except (OSError, ValueError, struct.error) as error:
        raise InputError("FILE", str(file), f"It cannot be read as GGUF ({error}).") from error
    instead = "Take the folder that the file was made from, by its name on the hub."
    if (found := metadata["general.architecture"]) != ARCHITECTURE:
        raise InputError("FILE", str(file), f"Its architecture is {found}; {ARCHITECTURE} is converted. {instead}")
    scaled = "rope_freqs.weight" in tensors or metadata.get("llama.rope.scaling.type", "none") != "none"
    if scaled or metadata.get("llama.expert_count", 0):
        what = "Its rotary frequencies are scaled" if scaled else "It has experts"
        raise InputError("FILE", str(file), f"{what}, which this conversion does not keep. {instead}")
    kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind == "llama" or cut in GGUF_PRE_TOKENIZER_SPLITS:
        return None
    if cut != "smollm":
        raise InputError("FILE", str(file), f"Its tokenizer cuts texts by rules named {cut}, unknown here. {instead}")
    return _SMOLLM


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()
    try:
        convert(given.file, given.folder, getattr(torch, given.dtype))
    except InputError as error:
        parser.error(str(error))
