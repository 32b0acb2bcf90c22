"""The text of a shipped configuration with a person's own names; its comments stay."""

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml import MappingNode

from configs.validation import NAME_PATTERN
from flows.init.starting_point import Start, context_length, is_of_its_family
from flows.requests import OWN
from grpo_core.errors import InputError
from grpo_core.policies.protocol import policy_family
from tasks.process import CHECKOUT

EXAMPLES = CHECKOUT / "data" / "init-examples"
"""Prompts, held-out prompts and a reward function for images, texts and texts about images."""

_FUNCTIONS: Mapping[str, str] = {"image": "middle_colour", "text": "sorted_letters", "vision": "near_the_box"}

CONFIG, PROMPTS, HELDOUT, REWARD = "config.yaml", "prompts", "heldout", "reward.py"


def config_text(start: Start, folder: Path) -> str:
    """Return the shipped configuration with what was given."""
    request, place = start.request, start.request.folder.rstrip("/")
    name = folder.resolve().name
    values: dict[str, str | None] = {"run.name": quoted(name if re.fullmatch(NAME_PATTERN, name) else "mine")}
    if request.model is not None:
        values |= _of_the_model(request.model, start)
    text = located(start.text)
    prompts = heldout = None
    if not start.keeps_data:
        prompts = request.prompts or f"{place}/{_example(start, PROMPTS)}"
        text = text.replace(section_of(text, "data"), _data_section(start, prompts))
        heldout = f"{place}/{_example(start, HELDOUT)}" if request.prompts is None else None
    heldout = request.heldout or heldout
    if heldout is not None:
        column = _target_column(heldout, request.heldout_targets, request.target_column)
        values |= {"evaluate.prompts": quoted(heldout)}
        values |= {f"evaluate.{key}": value for key, value in _targets(request.heldout_targets, column).items()}
    if (reward := start.reward) is not None:
        function = f"{place}/{REWARD}:{_FUNCTIONS[start.examples]}" if reward == OWN else reward
        text = text.replace(section_of(text, "rewards"), _rewards_section(function))
    text = fill(text, values)
    if prompts is not None and heldout is None:
        # Nothing is held out of prompts that were given alone.
        section = section_of(text, "evaluate")
        text = text.replace(section, "".join(f"# {line}\n" for line in section.splitlines()))
    config = shlex.quote(str(folder / CONFIG))
    lines = (
        f"Written by `grpo init` from configs/{start.name}.yaml. To check it, and to start it:",
        *(f"    grpo {command} {config}" for command in ("doctor", "train")),
        "",
    )
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + text


def _of_the_model(model: str, start: Start) -> dict[str, str | None]:
    values: dict[str, str | None] = {"policy.model": quoted(model)}
    if not is_of_its_family(model, start.name):
        # The names of its layers.
        values["policy.lora.targets"] = None
    if policy_family(start.kind).modality == "text" and (room := context_length(model)) is not None:
        most: int = start.given["rollout"]["max_completion_length"]
        values["rollout.max_completion_length"] = str(min(most, room // 2))
    return values


def _example(start: Start, stem: str) -> str:
    (path,) = (EXAMPLES / start.examples).glob(f"{stem}.*")
    return path.name


_IMAGES = (
    "  # Columns `image` or `images` are what the model sees: files beside this one, or bytes. <image> in a prompt",
    "  # says where its image is; without one it comes first.",
)


def _data_section(start: Start, prompts: str) -> str:
    lines = [
        "  # .txt with a prompt per line, or .jsonl, .csv, .tsv, .parquet with a column `prompt`; the other columns",
        "  # are passed to the rewards.",
        *(_IMAGES if start.kind == "vision_lm" else ()),
        f"  prompts: {quoted(prompts)}",
    ]
    if start.edits:
        lines.append(f"  image_column: {start.given['data']['image_column']}  # of the image to edit")
    request = start.request
    column = _target_column(prompts, request.targets, request.target_column)
    lines += [f"  {key}: {value}" for key, value in _targets(request.targets, column).items() if value is not None]
    return "\n".join(["data:", *lines, ""])


def _targets(folder: str | None, column: str | None) -> dict[str, str | None]:
    given = {"targets": folder, "target_column": column}
    return {key: None if value is None else quoted(value) for key, value in given.items()}


def _target_column(prompts: str, folder: str | None, given: str | None) -> str | None:
    """Return the column that names targets: the given one, or the only one whose cells are all files."""
    if given is not None or folder is None:
        return given
    from tasks.prompts.files import list_input_folder
    from tasks.prompts.read import read_prompts

    try:
        names = {*list_input_folder(folder, place="--targets")}
        rows = [prompt.columns for prompt in read_prompts(prompts).prompts]
    except InputError:
        # The check of what is written reports it.
        return None
    found = [column for column in rows[0] if all(str(row.get(column)) in names for row in rows)]
    if len(found) > 1:
        raise InputError("--target-column", None, f"{', '.join(found)} name files of {folder} in each row; choose one.")
    return found[0] if found else None


def _rewards_section(reward: str) -> str:
    lines = ["rewards:", "  # Several rewards are added by weight; `grpo rewards list` shows all of them."]
    if ":" in reward:
        lines += ["  - reward: function", f"    settings: {{function: {quoted(reward)}}}"]
    else:
        lines += [f"  - reward: {quoted(reward)}"]
    return "\n".join([*lines, ""])


_SHIPPED = re.compile(r"(?<=: )(?:data|configs)/[\w./-]+")


def fill(text: str, values: Mapping[str, str | None]) -> str:
    """Give settings of a configuration in block style other values; comments stay.

    Args:
        values: YAML by section and key, such as `policy.lora.rank`; None removes a setting. One that is missing is
            added at the head of its section.
    """
    for path, value in values.items():
        text = _with_setting(text, *path.split("."), value=value)
    return text


def _with_setting(text: str, *path: str, value: str | None) -> str:
    node: Any = yaml.compose(text)
    head = 0
    for depth, name in enumerate(path):
        found = [each for each in node.value if each[0].value == name] if isinstance(node, MappingNode) else []
        if not found:
            assert value is None or depth == len(path) - 1, f"the configuration has no section for {'.'.join(path)}"
            return text if value is None else f"{text[:head]}{'  ' * depth}{name}: {value}\n{text[head:]}"
        ((key, node),) = found
        head = text.index("\n", key.end_mark.index) + 1
    if value is None:
        line, end = text.rindex("\n", 0, key.start_mark.index), text.index("\n", node.end_mark.index)
        return text[:line] + text[end:]
    return text[: node.start_mark.index] + value + text[node.end_mark.index :]


def section_of(text: str, name: str) -> str:
    """Return the lines of a section, with its name; empty without one."""
    found = re.search(rf"^{name}:.*\n(?:(?: .*)?\n)*", text, re.MULTILINE)
    return found[0].rstrip("\n") + "\n" if found else ""


def located(text: str) -> str:
    """Name shipped files as the working directory finds them: in the checkout as they are written, relative to it."""
    if os.path.samefile(CHECKOUT, Path.cwd()):
        return text
    return _SHIPPED.sub(lambda found: str(CHECKOUT / found[0]) if (CHECKOUT / found[0]).exists() else found[0], text)


def quoted(value: str) -> str:
    """Write a text as YAML, which reads JSON's quotes."""
    return json.dumps(value, ensure_ascii=False)
