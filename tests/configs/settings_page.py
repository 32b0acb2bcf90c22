"""What docs has from the code: the keys of settings.md, and in coming_from_trl.md what becomes of each field of TRL's.

`python -m tests.configs.settings_page` writes both.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import configs
from configs.placement import PlacementSection, StorageSection
from configs.prompts import DataSection, DatasetSection, EvaluateSection
from configs.schema import ROLLOUTS
from configs.scoring import AdvantagesSection, GuardrailsSection, RewardSection
from configs.sections import PolicySection, RunSection
from configs.training import ALGORITHMS, UpdateSection
from configs.trl_names import OTHER_MEANING, TRL_NAMES, options_without_setting

PAGE = Path(configs.__file__).parent.parent / "docs" / "settings.md"
TRL_PAGE = PAGE.parent / "coming_from_trl.md"
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"
TRL_BEGIN, TRL_END = "<!-- fields: begin -->", "<!-- fields: end -->"
TRL_NOTES: Mapping[str, str] = {
    "epsilon_high": "of `cispo` it is `update.loss_settings.ratio_cap`",
    "loss_type": "TRL's `gspo` is `grpo` with one ratio per sequence",
    "scale_rewards": "`true` is `group`, `false` is `none`",
    "use_bias_correction_kl": "here also times the mismatch weights, which TRL leaves out of the KL",
}
"""What differs in a field whose name is accepted."""

SECTIONS: Mapping[str, tuple[str, tuple[type[BaseModel], ...]]] = {
    "run": ("", (RunSection,)),
    "policy": ("", (PolicySection,)),
    "data": ("", (DataSection,)),
    "data.datasets.N": (
        "One entry of `data.datasets` or `evaluate.datasets`. Next to `datasets`, `data` has only `curriculum`.",
        (DatasetSection,),
    ),
    "rollout": (
        "The keys depend on `policy.kind`.",
        tuple(ROLLOUTS.values()),
    ),
    "rewards.N": (
        "One entry of the list `rewards`: [rewards.md](rewards.md).",
        (RewardSection,),
    ),
    "advantages": ("", (AdvantagesSection,)),
    "update": (
        "Of tokens (tokens), of denoising steps by importance ratios (grpo), and of finished images by [matching "
        "velocities](denoising.md#matching-velocities-updatealgorithm) (nft, awm, v_grpo, ram), which "
        "`update.algorithm` chooses. If both streams are trained, these keys stand under `update.tokens` and "
        "`update.denoising`.",
        (UpdateSection, *ALGORITHMS["denoising"].values()),
    ),
    "evaluate": ("", (EvaluateSection,)),
    "guardrails": ("", (GuardrailsSection,)),
    "placement": ("", (PlacementSection,)),
    "storage": ("", (StorageSection,)),
}
"""Title of a table -> what stands above it, and the sections whose keys it has."""

_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "rollout": tuple(ROLLOUTS),
    "update": ("tokens", *ALGORITHMS["denoising"]),
}
_SAME_AS: Mapping[str, tuple[str, ...]] = {
    title: tuple(name for name in section.model_fields if name in DataSection.model_fields and name != "datasets")
    for title, section in (("data.datasets.N", DatasetSection), ("evaluate", EvaluateSection))
}
"""Title of a table -> the keys that it has from `data`."""
_ATTRIBUTE = re.compile(r"^        (\w+): (.+(?:\n {12}.+)*)", re.MULTILINE)
_CITED = re.compile(r"\([A-Z][^()]*, (arXiv:[\d.]+)\)")
_WORDS = {"string": "text", "boolean": "true or false", "null": "null", "object": "mapping"}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


def page() -> str:
    """All tables of the page."""
    return "\n".join([BEGIN, "", *(line for title in SECTIONS for line in _table(title)), END])


def trl_section() -> str:
    """What becomes of every field of GRPOConfig: the lists of the page on TRL."""
    accepted = []
    for path, ours in TRL_NAMES.items():
        name = path.partition(".")[2]
        accepted.append(f"- `{name}`: `{ours}`{f'; {TRL_NOTES[name]}' if name in TRL_NOTES else ''}")
    hints: dict[str, list[str]] = {}
    for path, hint in OTHER_MEANING.items():
        hints.setdefault(hint.rstrip("."), []).append(path.partition(".")[2])
    unlike: dict[bool, list[str]] = {False: [], True: []}
    for left_out, names, ours, why in options_without_setting():
        keys = _code(ours.split(", ")) if ours else ""
        unlike[left_out].append(f"- {_code(names)}: {'; '.join(each for each in (keys, why) if each)}")
    lists = {
        "Accepted": accepted,
        "Refused, with what to set": [f"- {_code(names)}: {hint}" for hint, names in hints.items()],
        "Another way": unlike[False],
        "Left out on purpose": unlike[True],
    }
    lines = [line for title, rows in lists.items() for line in (f"### {title}", "", *rows, "")]
    return "\n".join([TRL_BEGIN, "", *lines, TRL_END])


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(title: str) -> Iterator[str]:
    """Yield the section's heading and rows: those of all its variants, then those of some of them under a heading."""
    note, sections = SECTIONS[title]
    names = _VARIANTS.get(title, ("",))
    rows: dict[str, dict[str, tuple[str, str, str]]] = {}
    for name, section in zip(names, sections, strict=True):
        for path, *cells in _rows(section, "", {}):
            rows.setdefault(path, {})[name] = (cells[0], cells[1], cells[2])
    same = _SAME_AS.get(title, ())
    yield from (f"## {title}", "", *([textwrap.fill(note, 150), ""] if note else []))
    shown = {path: cells for path, cells in rows.items() if path.partition(".")[0] not in same}
    if same:
        yield from ("All keys of `data` but `datasets` and `curriculum`, and:", "")
    groups: dict[tuple[str, ...], list[str]] = {names: []}
    for path, by_variant in shown.items():
        groups.setdefault(tuple(by_variant), []).append(path)
    for variants, paths in groups.items():
        if variants != names:
            yield from (f"### {title}: {', '.join(variants)}", "")
        for path in paths:
            yield _row(path, shown[path])
        yield ""


def _row(path: str, by_variant: Mapping[str, tuple[str, str, str]]) -> str:
    """Write a key with its default as in a file, then its type where the default does not tell, and its effect."""
    kinds, defaults, _ = ([*dict.fromkeys(cells)] for cells in zip(*by_variant.values(), strict=True))
    effects: dict[str, list[str]] = {}
    for name, (*_, effect) in by_variant.items():
        effects.setdefault(effect, []).append(name)
    first, *others = effects
    effect = "; ".join([first, *(f"{', '.join(effects[other])}: {other}" for other in others)])
    shown, given = path, ", ".join(kinds)
    if kinds != [f"`{each}`" for each in defaults]:
        if len(defaults) > 1:
            given = "; ".join([given, *(f"{name}: {cells[1] or 'required'}" for name, cells in by_variant.items())])
        elif defaults[0]:
            shown = f"{path}: {defaults[0]}"
            given = given.removeprefix(f"`{defaults[0]}`, ").replace(f", `{defaults[0]}`", "")
            given = "" if given == "true or false" else given.removeprefix(f"`{defaults[0]}` or ")
    return f"- `{shown}`{f' ({given})' if given else ''}: {effect}"


def _rows(
    section: type[BaseModel], prefix: str, shown: dict[type[BaseModel], str]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield path, type, default and effect of each key, those of inner sections with their path, of a kind once."""
    schema, effects = section.model_json_schema(), _documented(section)
    for name, field in section.model_fields.items():
        path, inner = f"{prefix}{name}", _inner(field.annotation)
        effect = re.sub(r"\bNone\b", "null", field.description or effects.get(name, ""))
        effect = _CITED.sub(r"(\1)", " ".join(effect.split()).rstrip("."))
        if inner is None:
            factory: Any = field.default_factory
            default = _shown(factory() if factory else field.default)
            kind = _type(schema["properties"][name], schema)
            yield path, kind.removesuffix(" or null") if default == "null" else kind, default, effect
            continue
        kind, default = ("section or null", "null") if field.default is None else ("section", "")
        effect = effect or (inspect.getdoc(inner) or "").partition(".")[0]
        if inner in shown:
            own = f"{field.description}; " if field.description else ""
            yield path, kind, default, f"{own}keys as of `{shown[inner]}`"
            continue
        shown[inner] = path
        yield path, kind, default, effect
        yield from _rows(inner, f"{path}.", shown)


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The section that a key has, or may have."""
    options = [annotation, *getattr(annotation, "__args__", ())] if not _is_sequence(annotation) else []
    return next((each for each in options if inspect.isclass(each) and issubclass(each, BaseModel)), None)


def _is_sequence(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) in (tuple, list, dict)


def _documented(section: type[BaseModel]) -> dict[str, str]:
    """Return what the docstrings of a section and of the settings it inherits say of their attributes."""
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        text = each.__dict__.get("__doc__") or ""
        attributes = text.partition("Attributes:")[2]
        found |= {name: " ".join(effect.split()) for name, effect in _ATTRIBUTE.findall(attributes)}
    return found


def _shown(default: object) -> str:
    if default is PydanticUndefined:
        return ""
    if isinstance(default, BaseModel):
        return ""
    if isinstance(default, str):
        return default
    if isinstance(default, float):
        return f"{default:g}"
    return json.dumps(default, default=list)


def _type(part: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Write a part of a section's JSON schema in words."""
    if "$ref" in part:
        return _type(schema["$defs"][part["$ref"].rpartition("/")[2]], schema)
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(_type(each, schema) for each in part["anyOf"]))
    if "enum" in part:
        return ", ".join(f"`{json.dumps(each).strip(chr(34))}`" for each in part["enum"])
    if "const" in part:
        return f"`{part['const']}`"
    match part.get("type"):
        case "array" if "prefixItems" in part:
            return f"[{', '.join(_type(each, schema) for each in part['prefixItems'])}]"
        case "array":
            return f"list of {_type(part.get('items', {}), schema)}"
        case "integer" | "number" as kind:
            bounds = [f"{words}{_number(part[bound])}" for bound, words in _BOUNDS.items() if bound in part]
            return " ".join([kind, ", ".join(bounds)]).strip()
        case kind:
            return _WORDS.get(kind or "", "any value")


def _number(value: float) -> str:
    return f"{value:,}" if value == int(value) else f"{value:g}"


def write() -> None:
    """Put all of it into the pages."""
    for file, begin, end, inside in ((PAGE, BEGIN, END, page()), (TRL_PAGE, TRL_BEGIN, TRL_END, trl_section())):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.partition(begin)[0] + inside + text.partition(end)[2], encoding="utf-8")


if __name__ == "__main__":
    write()
