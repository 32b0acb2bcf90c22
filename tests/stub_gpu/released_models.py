"""Folders of released models that take no space: their configurations, tiny tokenizers, and weights that are holes."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

import data
from grpo_core.policies import glm_image
from tests.grpo_core.policies.diffusers import tiny_pipelines
from tests.grpo_core.policies.vision_lm.tiny_families import make_model

_CONFIGS = json.loads(Path(__file__).with_name("released.json").read_text())
_TINY = Path(data.__file__).parent / "models"
_GLM_IMAGE = Path(glm_image.__file__).parent / "released"
_DEPTHS = ("num_layers", "num_hidden_layers", "depth")
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_SHARD_BYTES = 8 << 30


def write_model(name: str, folder: Path, dtype: torch.dtype, *, blocks: int | None = None) -> None:
    """Write a model; whoever reads its weights gets zeros.

    Args:
        blocks: the most that a network has; None: all.
    """
    if name == "glm_image":
        shutil.copytree(_TINY / "tiny-glm-image", folder)
        configs = {path.parent.name: json.loads(path.read_text()) for path in _GLM_IMAGE.glob("*/config.json")}
        # The tokenizer is the tiny one, whose ids are smaller.
        ids = json.loads((folder / "vision_language_encoder" / "config.json").read_text())
        named = ("image_token_id", "image_start_token_id", "image_end_token_id")
        configs["vision_language_encoder"] |= {each: ids[each] for each in named}
        configs["vae"] |= {"latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}
        processor = folder / "processor" / "processor_config.json"
        processor.write_text(json.dumps(json.loads(processor.read_text()) | {"unit": 32}))
    else:
        configs = _CONFIGS[name]
        if name in ("qwen2_5_7b", "qwen3_1_7b"):
            shutil.copytree(_TINY / "tiny-text", folder)
        elif name == "qwen2_5_vl":
            model, processor = make_model(name)
            model.save_pretrained(folder)
            processor.save_pretrained(folder)
        else:
            tiny_pipelines.save(name, folder)
    for part, values in configs.items():
        file = folder / part / "config.json"
        merged = _merged(json.loads(file.read_text()), values)
        file.write_text(json.dumps(merged if blocks is None else _cut(merged, blocks)))
    for weights in list(folder.rglob("*.safetensors")):
        _write_shards(weights, _network(weights.parent), dtype)


def _merged(own: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    both = {name for name, value in values.items() if isinstance(value, dict) and isinstance(own.get(name), dict)}
    return own | values | {name: _merged(own[name], values[name]) for name in both}


def _cut(config: dict[str, Any], blocks: int) -> dict[str, Any]:
    depths = {name: min(config[name], blocks) for name in _DEPTHS if name in config}
    return config | depths | {name: _cut(each, blocks) for name, each in config.items() if isinstance(each, dict)}


def _network(folder: Path) -> nn.Module:
    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        if "_class_name" in config:
            kind: Any = getattr(diffusers, config["_class_name"])
            return kind.from_config(config)
        kind = getattr(transformers, config["architectures"][0])
        return kind(kind.config_class.from_pretrained(folder))


def _write_shards(file: Path, network: nn.Module, dtype: torch.dtype) -> None:
    """Write files with an index, or one if it is small: none can be mapped that is larger than the machine's memory."""
    shards, size = list[dict[str, Tensor]](), _SHARD_BYTES
    saved = {id(value): (name, value) for name, value in reversed(network.state_dict(keep_vars=True).items())}
    for name, value in saved.values():
        count = value.numel() * dtype.itemsize
        if size + count > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += count
    if len(shards) == 1:
        _write_holes(file, shards[0], dtype)
        return
    file.unlink()
    names = [f"{file.stem}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    places = {name: shard for shard, values in zip(names, shards, strict=True) for name in values}
    index = {"metadata": {}, "weight_map": places}
    file.with_name(f"{file.name}.index.json").write_text(json.dumps(index))
    for shard, values in zip(names, shards, strict=True):
        _write_holes(file.with_name(shard), values, dtype)


def _write_holes(file: Path, values: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write a header of safetensors, and seek to the end of what it names."""
    header, end = {}, 0
    for name, value in values.items():
        begin, end = end, end + value.numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)
