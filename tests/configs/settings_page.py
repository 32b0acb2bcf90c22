"""What docs has from the code: the tables of settings.md, and of coming_from_trl.md what the refused names say.

`python -m tests.configs.settings_page` writes both.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import configs
from configs.placement import PlacementSection, StorageSection
from configs.schema import ROLLOUTS
from configs.scoring import AdvantagesSection, GuardrailsSection, RewardSection
from configs.sections import DataSection, DatasetSection, EvaluateSection, PolicySection, RunSection
from configs.training import DenoisingUpdateSection, NftUpdateSection, UpdateSection
from configs.trl_names import OTHER_MEANING

PAGE = Path(configs.__file__).parent.parent / "docs" / "settings.md"
TRL_PAGE = PAGE.parent / "coming_from_trl.md"
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"

SECTIONS: Mapping[str, tuple[str, tuple[type[BaseModel], ...]]] = {
    "run": ("", (RunSection,)),
    "policy": ("", (PolicySection,)),
    "data": ("", (DataSection,)),
    "data.datasets.N": (
        "One entry of `data.datasets`, and of `evaluate.datasets`; the keys of `data` that are not given here apply to "
        "every entry.",
        (DatasetSection,),
    ),
    "rollout": (
        "The keys depend on `policy.kind`; where a default differs, each is given.",
        tuple(ROLLOUTS.values()),
    ),
    "rewards.N": (
        "One entry of the list `rewards`. docs/rewards.md has the rewards and their own settings.",
        (RewardSection,),
    ),
    "advantages": ("", (AdvantagesSection,)),
    "update": (
        "Of tokens (tokens), of denoising steps by importance ratios (grpo), and by DiffusionNFT (nft), which "
        "`update.algorithm` chooses. If both streams are trained, these keys stand under `update.tokens` and "
        "`update.denoising`.",
        (UpdateSection, DenoisingUpdateSection, NftUpdateSection),
    ),
    "evaluate": ("", (EvaluateSection,)),
    "guardrails": ("", (GuardrailsSection,)),
    "placement": ("", (PlacementSection,)),
    "storage": ("", (StorageSection,)),
}
"""Title of a table -> what stands above it, and the sections whose keys it has."""

_VARIANTS: Mapping[str, tuple[str, ...]] = {
    "rollout": tuple(ROLLOUTS),
    "update": ("tokens", "grpo", "nft"),
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


def trl_page() -> str:
    """The page on TRL's names; in the last cell of a refused one stands the hint of its error."""
    hints = {path.partition(".")[2]: hint for path, hint in OTHER_MEANING.items()}
    return re.sub(
        r"^(\| `(\w+)` \|.*\| refused \|).*\|$",
        lambda row: f"{row[1]} {hints[row[2]].rstrip('.')} |",
        TRL_PAGE.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )


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
        keys = ", ".join(f"`{key}`" for key in same if key in rows)
        yield from (f"As in `data`: {keys}.", "")
    groups: dict[tuple[str, ...], list[str]] = {names: []}
    for path, by_variant in shown.items():
        groups.setdefault(tuple(by_variant), []).append(path)
    for variants, paths in groups.items():
        if variants != names:
            yield from (f"### {title}: {', '.join(variants)}", "")
        for path in paths:
            kind, default = _one_of(shown[path], 0), _one_of(shown[path], 1)
            given = ", ".join(each for each in (kind, default and f"default {default}") if each)
            yield f"- `{path}` ({given}): {next(iter(shown[path].values()))[2]}"
        yield ""


def _one_of(by_variant: Mapping[str, tuple[str, str, str]], index: int) -> str:
    values = {name: cells[index] for name, cells in by_variant.items()}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return "; ".join(f"{name}: {value}" for name, value in values.items())


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
            yield path, kind, default, f"{effect}; keys as of `{shown[inner]}`"
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
        return f"`{default}`"
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
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(before + page() + after, encoding="utf-8")
    TRL_PAGE.write_text(trl_page(), encoding="utf-8")


if __name__ == "__main__":
    write()
