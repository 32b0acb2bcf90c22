"""Read YAML files as plain values, without any model library; TRL's names of keys, and suggestions for unknown ones."""

import copy
import difflib
import json
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import BaseModel

from grpo_core.errors import InputError
from grpo_core.losses.settings import LOSSES
from grpo_core.streams import STREAMS

TRL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "advantages.multi_objective_aggregation": "advantages.aggregation",
        "advantages.scale_rewards": "advantages.scale",
        "evaluate.num_generations_eval": "evaluate.samples_per_prompt",
        "policy.model_name_or_path": "policy.model",
        "rollout.num_generations": "rollout.group_size",
        "update.adam_epsilon": "update.eps",
        "update.beta": "update.kl_coef",
        "update.epsilon": "update.clip_range",
        "update.epsilon_high": "update.clip_range_high",
        "update.importance_sampling_level": "update.importance_level",
        "update.loss_type": "update.loss",
        "update.lr_scheduler_type": "update.lr_scheduler",
        "update.mask_truncated_completions": "update.mask_truncated",
        "update.num_iterations": "update.epochs",
        "update.off_policy_mask_threshold": "update.off_policy_threshold",
        "update.per_device_train_batch_size": "update.micro_batch_size",
        "update.ref_model_mixup_alpha": "update.reference.mix",
        "update.sapo_temperature_neg": "update.loss_settings.sapo_temperature_neg",
        "update.sapo_temperature_pos": "update.loss_settings.sapo_temperature_pos",
        "update.top_entropy_quantile": "update.entropy_quantile",
        "update.use_bias_correction_kl": "update.kl_importance_correction",
        "update.vespo_k_neg": "update.loss_settings.vespo_k_neg",
        "update.vespo_k_pos": "update.loss_settings.vespo_k_pos",
        "update.vespo_lambda_neg": "update.loss_settings.vespo_lambda_neg",
        "update.vespo_lambda_pos": "update.loss_settings.vespo_lambda_pos",
        "update.vllm_importance_sampling_clip_max": "update.mismatch.cap",
        "update.vllm_importance_sampling_clip_min": "update.mismatch.floor",
    }
)
"""Path with TRL's name -> path with ours; both mean the same, in the same unit."""

OTHER_MEANING: Mapping[str, str] = MappingProxyType(
    {
        "evaluate.eval_steps": "Set `evaluate.every`: it counts iterations, `eval_steps` counts optimizer steps.",
        "rollout.generation_batch_size": "Set `rollout.prompts_per_iteration` to `generation_batch_size` / "
        "`num_generations`: it counts prompts, not completions.",
        "rollout.steps_per_generation": "Set `update.minibatch_size` to the rows of one optimizer step.",
        "rollout.use_transformers_continuous_batching": "Leave it out; `rollout.engine` is `policy` or `vllm`.",
        "rollout.use_vllm": "Set `rollout.engine` to `vllm` and `rollout.vllm` to its server (docs/operations.md), or "
        "the engine to `policy`.",
        "run.log_completions": "Leave it out: every sample is stored, and trackers get the held-out ones.",
        "run.max_steps": "Set `run.iterations`: it counts rounds of sampling and training, `max_steps` optimizer "
        "steps. An iteration has `update.epochs` x its rows / `update.minibatch_size` of them.",
        "run.num_train_epochs": "Set `run.iterations` to `num_train_epochs` x prompts / "
        "`rollout.prompts_per_iteration`.",
        "run.report_to": "Set `run.trackers` to a list of the same names, such as `[tensorboard, wandb]`, or to `[]`.",
        "run.output_dir": "Set `run.name`, and `storage.root` for the folder of all runs.",
        "update.adam_beta1": "Set `update.betas` to `[adam_beta1, adam_beta2]`.",
        "update.adam_beta2": "Set `update.betas` to `[adam_beta1, adam_beta2]`.",
        "update.gradient_accumulation_steps": "Set `update.minibatch_size`, the rows of one optimizer step, to "
        "`per_device_train_batch_size` x `gradient_accumulation_steps` x processes.",
        "update.optim": "Set `update.optimizer` to `adamw`, `adamw_8bit`, `paged_adamw` or `paged_adamw_8bit`.",
        "update.ref_model_sync_steps": "Set `update.reference.refresh_every`: it counts iterations, "
        "`ref_model_sync_steps` counts optimizer steps.",
        "update.sync_ref_model": "Set `update.reference.refresh_every` to the iterations between refreshes, or to 0.",
        "update.vllm_importance_sampling_correction": "Set `update.mismatch.mode` to `truncate`, `mask` or `none`.",
        "update.vllm_importance_sampling_mode": "Set `update.mismatch.level` to its first half, `token` or `sequence`, "
        "and `update.mismatch.mode` to its second, `truncate` or `mask`.",
    }
)
"""Path with TRL's name -> what to set instead, in Markdown; PAGE has it from here."""

ABBREVIATIONS: Mapping[str, str] = MappingProxyType(
    {
        "lr": "learning_rate",
        "kl": "kl_coef",
        "wd": "weight_decay",
        "steps": "iterations",
        "model_name": "model",
        "device": "devices",
        "processes": "devices",
    }
)
"""What people call a setting -> its name."""

PAGE = Path(__file__).parent.parent / "docs" / "coming_from_trl.md"
"""The page that has every option of TRL's, and why some are left out."""

NONE_CHOSEN: Mapping[str, type[BaseModel]] = MappingProxyType({})

_SCALES = {True: "group", False: "none"}


def our_path(path: str) -> str:
    """Return the path of a setting with our name for it; of an update's also where they stand by stream."""
    section, stream, name = (*path.split(".", 2), "", "")[:3]
    if section == "update" and stream in STREAMS:
        return f"update.{stream}{TRL_NAMES.get(f'update.{name}', f'update.{name}').removeprefix('update')}"
    return TRL_NAMES.get(path, path)


def translate(values: dict[str, Any]) -> list[InputError]:
    """Rename TRL's settings in a configuration, in place.

    Returns:
        Errors for the settings that cannot be renamed; these are removed.
    """
    errors = []
    for path in (*TRL_NAMES, *OTHER_MEANING):
        section, _, name = path.partition(".")
        found = values.get(section)
        if not isinstance(found, dict):
            continue
        errors += _translate(found, section, name)
        for stream in STREAMS if section == "update" else ():
            if isinstance(inner := found.get(stream), dict):
                errors += _translate(inner, f"{section}.{stream}", name)
    return errors


def _translate(found: dict[str, Any], place: str, name: str) -> list[InputError]:
    """Rename one of TRL's settings in a section.

    Args:
        place: path of the section.
    """
    if name not in found:
        return []
    path, value = f"{place.partition('.')[0]}.{name}", found.pop(name)
    if path == "update.epsilon_high" and "cispo" in (found.get("loss"), found.get("loss_type")):
        hint = f"With cispo TRL's epsilon_high caps the ratio itself; set {place}.loss_settings.ratio_cap."
        return [InputError(f"{place}.{name}", value, hint)]
    if path in OTHER_MEANING:
        return [InputError(f"{place}.{name}", value, OTHER_MEANING[path].replace("`", ""))]
    target = TRL_NAMES[path].partition(".")[2]
    *parents, last = target.split(".")
    section = found
    for parent in parents:
        inner: Any = section.setdefault(parent, {})
        if not isinstance(inner, dict):
            return []  # reported as a section that is not a mapping
        section = inner
    if last in section:
        hint = f"{place}.{target} is set too and means the same; leave one of them out."
        return [InputError(f"{place}.{name}", value, hint)]
    section[last] = _SCALES[value] if name == "scale_rewards" and isinstance(value, bool) else value
    return []


def nearest_key(
    model: type[BaseModel], location: Sequence[str], chosen: Mapping[str, type[BaseModel]] = NONE_CHOSEN
) -> str:
    """Suggest the full paths of similar keys, and list the keys of the section.

    Args:
        location: path of the unknown key; numbers are indices in a list.
        chosen: models by path, for fields that allow several.
    """
    if ".".join(location) in ("update.tokens", "update.denoising"):
        return "Only a run that trains both streams (policy.train) has one update each; give its keys in update itself."
    section, name = tuple(part for part in location[:-1] if not part.isdigit()), location[-1]
    if section[:1] == ("update",) and any(name in loss.settings for loss in LOSSES.values()):
        return f"Only one loss reads it; set {'.'.join((*section, 'loss_settings', name))}."
    paths = list(_paths(model, chosen))
    here = [path for path in paths if path[:-1] == section]
    elsewhere = [path for path in paths if path[:-1] != section]
    renamed = [tuple(ours.split(".")) for trl, ours in TRL_NAMES.items() if trl.endswith(f".{name}")]
    short = ABBREVIATIONS.get(name)
    near = (
        _close(name, here, cutoff=0.85)
        or [path for path in paths if path[-1] == short]
        or [path for path in elsewhere if path[-1] == name]
        or [path for path in renamed if path in paths]
    )
    if not near and (reason := reason_on_page(name)):
        return reason
    # Few letters are near to anything elsewhere: lr to lora.
    near = near or _close(name, here) or (_close(name, elsewhere) if len(name) > 3 else [])
    if near:
        # Keys of an entry of a list have its number.
        whole = ((*location[:-1], path[-1]) if path in here else path for path in near[:3])
        return f"Did you mean {' or '.join('.'.join(path) for path in whole)}?"
    return f"Known here: {', '.join(path[-1] for path in here)}."


def reason_on_page(name: str) -> str | None:
    """Return what the page on TRL's names says about one without a setting of the same meaning here; None without."""
    try:
        lines = PAGE.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")):
        if len(cells) == 4 and f"`{name}`" in cells[0].split(", "):
            _, ours, how, why = (cell.replace("`", "") for cell in cells)
            if how == "no":
                return f"TRL's {name} is left out on purpose: {why}{f'; see {ours}' if ours else ''}."
            if how == "otherwise":
                return f"TRL's {name} {f'is {ours}' if ours else 'needs no setting'} here{f': {why}' if why else ''}."
    return None


def section_hint(
    model: type[BaseModel], location: Sequence[str], chosen: Mapping[str, type[BaseModel]], found: object
) -> str:
    """Say how a section is written, for a value in its place.

    Args:
        location: path of the section; numbers are indices in a list.
        chosen: as for nearest_key.
        found: the value.
    """
    section = tuple(part for part in location if not part.isdigit())
    keys = [path[-1] for path in _paths(model, chosen) if path[:-1] == section]
    if section == ("rewards",) and isinstance(found, str):
        return f"An entry has keys and values: write it as {{reward: {found}}}."
    some = ", ".join(keys[:6]) + (", ..." if len(keys) > 6 else "")
    return f"It has keys and values: {some}. Write those that you need, or leave it out if it has a default."


def list_hint(model: type[BaseModel], location: Sequence[str], chosen: Mapping[str, type[BaseModel]]) -> str | None:
    """Say how a list of sections is written, for a value in its place; None for a list of plain values.

    Args:
        location: path of the list.
        chosen: as for nearest_key.
    """
    section = tuple(part for part in location if not part.isdigit())
    entry = _model_at(model, section, chosen)
    if entry is None:
        return None
    needed = ", ".join(f"{name}: ..." for name, field in entry.model_fields.items() if field.is_required())
    return f"It has to be a list, each entry with its keys: {section[-1]}: [{{{needed}}}]."


def _model_at(
    model: type[BaseModel], section: Sequence[str], chosen: Mapping[str, type[BaseModel]]
) -> type[BaseModel] | None:
    for depth, name in enumerate(section, start=1):
        field = model.model_fields.get(name)
        found = chosen.get(".".join(section[:depth])) or next(iter(_models(field.annotation if field else None)), None)
        if found is None:
            return None
        model = found
    return model


def _close(name: str, paths: Sequence[tuple[str, ...]], cutoff: float = 0.6) -> list[tuple[str, ...]]:
    close = difflib.get_close_matches(name, {path[-1] for path in paths}, n=1, cutoff=cutoff)
    return [path for path in paths if path[-1] in close]


def _paths(
    model: type[BaseModel], chosen: Mapping[str, type[BaseModel]], above: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key of a model; the entries of a list have the path of the list."""
    for name, field in model.model_fields.items():
        path = (*above, name)
        yield path
        only = chosen.get(".".join(path))
        for inner in [only] if only else _models(field.annotation):
            yield from _paths(inner, chosen, path)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models(argument)]


_NUMBER_BITS = 1024
"""Longest whole number; what is longer is beyond every float, and cannot be printed."""


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a repeated key is an error and 1e-5 is a number."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Make the value of a node; a scalar that is none of its kind, such as the date 2001-99-99, is a YAML error."""
        problem = f"it is no value of the kind {node.tag.rpartition(':')[2]}"
        try:
            value = super().construct_object(node, deep)
        # PyYAML lets the errors of Python's own conversions through.
        except (ValueError, LookupError, AttributeError, OverflowError) as error:
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > _NUMBER_BITS:
            raise yaml.constructor.ConstructorError(None, None, "the number is too long", node.start_mark)
        return value


def _unique_keys(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key is a name, not a list", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} appears twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_keys)
# YAML 1.1 reads 1e-5 as text; people write learning rates like that.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


MAX_VALUES = 100_000
"""Maximum number of values of a file; aliases of aliases make billions of a few lines."""

MAX_CHARACTERS = 256 * 1024
"""Maximum length of a file, of which each 100,000 characters take a second to read."""

# Escaped as in JSON, a letter beyond U+FFFF would be two halves in YAML; these would end the line, or are no text.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")


def yaml_value(value: object) -> str:
    """Write a plain value as YAML of one line, such as the VALUE of `--set KEY=VALUE`; a path becomes its text."""
    written = json.dumps(value, ensure_ascii=False, default=os.fspath)
    return _ESCAPED.sub(lambda letter: f"\\u{ord(letter[0]):04x}", written)


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Count the values of a node and below it, those of an alias each time."""
    known = counts.get(id(node))
    if known is None:
        # An alias of what it is in is refused when the values are made.
        counts[id(node)] = 1
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        below = (each for item in inner for each in (item if isinstance(item, tuple) else (item,)))
        counts[id(node)] = known = 1 + sum(_count_values(each, counts) for each in below)
    return known


def parse_yaml(text: str, place: str) -> Any:
    """Parse YAML text to plain values.

    Raises:
        InputError: the text is not YAML; names the line. Or it has too many values, or nests them too deeply.
    """
    if len(text) > MAX_CHARACTERS:
        hint = (
            f"At most {MAX_CHARACTERS:,} characters are read. Move what is long, such as prompts, to files of its own."
        )
        raise InputError(place, f"{len(text):,} characters", hint)
    return copy.deepcopy(_parsed(text, place))


# A command reads the configuration of its run several times.
@lru_cache(maxsize=64)
def _parsed(text: str, place: str) -> Any:
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if (count := _count_values(node, {})) > MAX_VALUES:
            hint = f"At most {MAX_VALUES:,} are read. Its aliases (*name) repeat others; write out what is meant."
            raise InputError(place, f"{count:,} values", hint)
        return loader.construct_document(node)
    except RecursionError:
        raise InputError(place, f"{text[:40]}...", "Its values are nested too deeply. Flatten them.") from None
    except InputError:
        raise
    except (ValueError, OverflowError) as error:
        raise InputError(place, text[:40], f"It has an escape for no letter ({error}). Correct the YAML.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}, line {mark.line + 1}" if mark else place
        problem = getattr(error, "problem", None) or "it is not YAML"
        # An unclosed bracket is reported at the end of the text, possibly after its last line.
        lines = [*text.splitlines(), ""]
        raise InputError(where, lines[mark.line].strip() if mark else text, f"{problem}. Correct the YAML.") from error


def read_mapping(path: str | Path, place: str, *, example: str, keys: str) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping, as plain values.

    Args:
        place: the argument or option that names it, for messages.

    Raises:
        InputError: it cannot be read, or is not a mapping.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.yaml")], n=1)
        hint = f" Did you mean {file.parent / near[0]}?" if near else ""
        raise InputError(place, str(path), f"Give a readable YAML file, such as {example}.{hint}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise InputError(str(path), values, f"It has to be a mapping with the sections {keys}, ...")
    return values
