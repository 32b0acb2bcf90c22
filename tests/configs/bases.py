"""Small configurations of each kind of policy, and changes of them written as options of the command line."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from configs.loader import check_config
from configs.schema import RunConfig
from configs.yaml_files import parse_yaml
from grpo_core.errors import InputError

_SIZE = {"height": 64, "width": 64, "num_inference_steps": 10}
_GROUPS = {"prompts_per_iteration": 3, "group_size": 12}
_TEXT = {
    "policy": {"kind": "causal_lm", "model": "m"},
    "rollout": {**_GROUPS, "max_completion_length": 8},
    "rewards": [{"reward": "answer"}],
}
_SERVED = {"engine": "vllm", "vllm": {"url": "http://localhost:1"}}
_BOTH = {"model": "m", "train": ["tokens", "denoising"]}
_NFT_ROLLOUT = {**_SIZE, **_GROUPS, "sde_window_size": 0, "shared_noise": False}
_NFT = {"algorithm": "nft"}
_PIPELINE = {"policy": {"kind": "diffusers", "model": "m"}, "rollout": {**_SIZE, **_GROUPS, "guidance_scale": 4.5}}
BASES: dict[str, dict[str, Any]] = {
    "tokens": {},
    "sets": {"data": {"datasets": [{"name": "a", "prompts": "a.txt"}, {"name": "b", "prompts": "b.txt"}]}},
    "decoder": {"policy": {"model": "m", "train": ["denoising"]}},
    "both": {"policy": _BOTH, "rollout": {**_SIZE, **_GROUPS, "images_per_sample": 5}},
    "pipeline": _PIPELINE,
    "text": _TEXT,
    "engine": {**_TEXT, "rollout": {**_TEXT["rollout"], **_SERVED}},  # type: ignore[dict-item]
    "decoder nft": {"policy": {"model": "m", "train": ["denoising"]}, "rollout": _NFT_ROLLOUT, "update": _NFT},
    "pipeline nft": {**_PIPELINE, "rollout": {**_NFT_ROLLOUT, "guidance_scale": 4.5}, "update": _NFT},
    "both nft": {
        "policy": _BOTH,
        "rollout": {**_NFT_ROLLOUT, "images_per_sample": 5},
        "update": {"denoising": _NFT},
    },
}
_COMMON = {
    "run": {"name": "x", "iterations": 4, "seed": 7},
    "policy": {"model": "m"},
    "data": {"prompts": "prompts.txt"},
    "rollout": {**_SIZE, **_GROUPS},
    "rewards": [{"reward": "jpeg"}],
}


def values_of(base: str, changes: str = "") -> dict[str, Any]:
    """A base with changes in turn, `key=value; key=value`; the entry after the last of a list is added to it."""
    values: dict[str, Any] = deepcopy({**_COMMON, **BASES[base]})
    for place, value in parsed(changes):
        *above, last = place.split(".")
        inner: Any = values
        for name in above:
            inner = inner[int(name)] if name.isdigit() else inner.setdefault(name, {})
        if last.isdigit():
            inner[int(last) :] = [value]
        else:
            inner[last] = value
    return values


def parsed(changes: str) -> list[tuple[str, Any]]:
    """Key and value of each change."""
    pairs = [each.lstrip("!").partition("=") for each in changes.split("; ") if each]
    return [(place, parse_yaml(value, place)) for place, _, value in pairs]


def configured(base: str, changes: str = "") -> RunConfig:
    return check_config(values_of(base, changes))


def problems(base: str, changes: str = "") -> list[tuple[str, object]]:
    """Place and value of each mistake."""
    try:
        configured(base, changes)
    except InputError as errors:
        return [(error.place, error.value) for error in errors.errors]
    return []


def expected(row: str | Sequence[Any]) -> tuple[str, str, object]:
    """Changes, place and value of a row: of a text those of the change with a `!` before it."""
    if not isinstance(row, str):
        changes, place, value = row
        return changes, place, value
    ((place, value),) = parsed("; ".join(each for each in row.split("; ") if each.startswith("!")))
    return row, place, value
